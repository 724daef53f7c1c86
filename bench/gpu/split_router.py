"""The router of a mode of `pd_goodput`: every request is split, whatever that costs.

python -m bench.gpu.split_router --config router.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging

from stoker.pod.config_file import load
from stoker.router.config import RouterConfig
from stoker.router.main import run
from stoker.router.snapshot import load_snapshot
from testing.router.always_split import AlwaysSplit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    logging.basicConfig(level=logging.INFO)
    config = load(RouterConfig, parser.parse_args().config)
    asyncio.run(run(config, load_snapshot(config.backends_file), pod_uid="", policy=AlwaysSplit()))


if __name__ == "__main__":
    main()
