"""The images of the end-to-end run, in the store that nodes are cloned from.

python -m e2e.images build    build what has changed and bring it into the store
python -m e2e.images check    print what this machine lacks, one line each
python -m e2e.images show     name the images in the store
"""

from __future__ import annotations

import sys

from e2e.cluster import binaries
from e2e.images.build import build_images
from e2e.images.commands import BuildError
from e2e.images.preflight import missing
from e2e.images.store import ImageStore


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status: 0 done, 1 missing or failed, 2 wrong command line."""
    store = ImageStore.default()
    verbs = {"build": lambda: build_images().names(), "check": lambda: missing(store.folder), "show": store.names}
    if len(arguments) != 1 or arguments[0] not in verbs:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        lines = verbs[arguments[0]]()
    except (BuildError, binaries.MissingBinaries) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return int(arguments == ["check"] and bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
