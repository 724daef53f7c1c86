"""Plain manifests for `kubectl apply -k deploy/`: the chart with its default values, without Helm's labels.

python -m e2e.charts.plain --write    write deploy/operator.yaml
python -m e2e.charts.plain --check    exit status 1 if the file differs from the chart
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from e2e.charts.helm import REPOSITORY, STOKER, rendered

FILE = REPOSITORY / "deploy" / "operator.yaml"
HEAD = "# Rendered from charts/stoker by `python -m e2e.charts.plain --write`; change the chart instead.\n"


def plain() -> str:
    """Return the whole file."""
    found = rendered(STOKER, None, "--skip-tests")
    return HEAD + "---\n".join(yaml.safe_dump(_unmarked(item), sort_keys=False, width=140) for item in found)


def _unmarked(item: dict[str, Any]) -> dict[str, Any]:
    labels = item["metadata"]["labels"]
    labels.pop("helm.sh/chart")
    labels["app.kubernetes.io/managed-by"] = "kustomize"
    return item


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status: 0 done or equal, 1 differs, 2 wrong command line."""
    if arguments == ["--write"]:
        FILE.write_text(plain())
        return 0
    if arguments == ["--check"]:
        return int(FILE.read_text() != plain())
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
