"""The cluster from a terminal.

python -m e2e.cluster up [--name N] [--nodes 2 | --config FILE]
python -m e2e.cluster down|status|env|check [--name N]
python -m e2e.cluster kill-node|remove-node NODE [--name N]
python -m e2e.cluster add-node NODE [--gpus 8] [--name N]
python -m e2e.cluster kubectl [--name N] -- get pods -A
"""

import argparse
import os
import sys
import time
from pathlib import Path

import yaml

from e2e.cluster import binaries, preflight
from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import ClusterError
from e2e.cluster.spec import NodeSpec, default_nodes, parse_nodes


def main(arguments: list[str]) -> int:
    """Run one verb; print a line on the error stream and return 1 if it fails."""
    options = _parser().parse_args(arguments)
    try:
        return _VERBS[options.verb](options)
    except (ClusterError, binaries.MissingBinaries, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _up(options: argparse.Namespace) -> int:
    nodes = (
        parse_nodes(yaml.safe_load(options.config.read_text())["nodes"])
        if options.config
        else default_nodes(options.nodes)
    )
    start = time.monotonic()

    def report(step: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {step}", file=sys.stderr, flush=True)

    Cluster(options.name, nodes, detached=True, report=report).up()
    report(f"cluster {options.name} is up")
    return _env(options)


def _down(options: argparse.Namespace) -> int:
    Cluster(options.name).down()
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = Cluster(options.name)
    if not cluster.running:
        print(f"cluster {options.name} does not run")
        return 1
    print(cluster.kubectl("get", "nodes,pods", "--all-namespaces", "--output=wide"), end="")
    return 0


def _env(options: argparse.Namespace) -> int:
    """Print the exports for `eval $(python -m e2e.cluster env)`."""
    cluster = Cluster(options.name)
    print(f"export KUBECONFIG={cluster.kubeconfig} PATH={binaries.bin_folder()}:$PATH")
    return 0


def _check(_: argparse.Namespace) -> int:
    lines = preflight.missing()
    print("\n".join(lines) or "nothing is missing")
    return 1 if lines else 0


def _kubectl(options: argparse.Namespace) -> int:
    program = str(binaries.bin_folder() / "kubectl")
    os.execv(
        program,
        [
            program,
            "--kubeconfig",
            str(Cluster(options.name).kubeconfig),
            *(word for word in options.arguments if word != "--"),
        ],
    )


def _add_node(options: argparse.Namespace) -> int:
    Cluster(options.name, detached=True).add_node(NodeSpec(name=options.node, gpus=options.gpus))
    return 0


def _kill_node(options: argparse.Namespace) -> int:
    Cluster(options.name).kill_node(options.node)
    return 0


def _remove_node(options: argparse.Namespace) -> int:
    Cluster(options.name).remove_node(options.node)
    return 0


_VERBS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "env": _env,
    "check": _check,
    "kubectl": _kubectl,
    "add-node": _add_node,
    "kill-node": _kill_node,
    "remove-node": _remove_node,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A real Kubernetes on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in _VERBS:
        command = verbs.add_parser(verb)
        command.add_argument("--name", default="stoker", help="the cluster's name (default: stoker)")
        if verb == "up":
            command.add_argument("--nodes", type=int, default=2, help="how many nodes, each with eight GPUs")
            command.add_argument(
                "--config", type=Path, help="a YAML file with `nodes:`, a list of what e2e/cluster/spec.py describes"
            )
        if verb.endswith("-node"):
            command.add_argument("node")
        if verb == "add-node":
            command.add_argument("--gpus", type=int, default=8)
        if verb == "kubectl":
            command.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
