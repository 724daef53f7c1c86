"""The CustomResourceDefinitions, generated from the types.

`python -m stoker.operator.api.crd --write|--check crds/`
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stoker.operator.api import lint
from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.enginepool import EnginePool
from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.metadata import GROUP, VERSION, Resource
from stoker.operator.api.schema import NotStructural, status_schema, structural_schema, without_fallbacks
from stoker.operator.api.trainingjob import TrainingJob


@dataclass(frozen=True)
class Column:
    """One column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    """Only shown with `-o wide`."""


@dataclass(frozen=True, kw_only=True)
class KindInfo:
    """The parts of a CRD beside its schema."""

    model: type[Resource]
    plural: str
    short_name: str
    max_name: int
    """Longest name; names of children start with it and are DNS labels."""
    columns: tuple[Column, ...]
    selectable: tuple[str, ...] = ()
    scale: bool = False

    @property
    def kind(self) -> str:
        return self.model.__name__

    @property
    def file_name(self) -> str:
        return f"{GROUP}_{self.plural}.yaml"


READY = Column("Ready", '.status.conditions[?(@.type=="Ready")].status')
MESSAGE = Column("Message", ".status.message")
AGE = Column("Age", ".metadata.creationTimestamp", "date")

KIND_INFOS = (
    KindInfo(
        model=TrainingJob,
        plural="trainingjobs",
        short_name="tj",
        max_name=40,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Step", ".status.progress.step", "integer"),
            Column("Of", ".status.progress.totalSteps", "integer"),
            Column("Loss", ".status.progress.loss"),
            Column("Verified", ".status.newestVerifiedCheckpoint.step", "integer"),
            Column("Restarts", ".status.restarts", "integer"),
            Column("Tokens/s", ".status.progress.tokensPerSecond", wide=True),
            Column("Lost", ".status.lostSteps", "integer", wide=True),
            MESSAGE,
            AGE,
        ),
        selectable=(".spec.scheduling.queueName", ".spec.modelFrom.checkpoint.name", ".spec.run.suspend"),
    ),
    KindInfo(
        model=Checkpoint,
        plural="checkpoints",
        short_name="ckpt",
        max_name=63,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Step", ".status.step", "integer"),
            Column("Loss", ".status.loss"),
            READY,
            Column("Verified", '.status.conditions[?(@.type=="Verified")].status'),
            Column("In use", '.status.conditions[?(@.type=="InUse")].status', wide=True),
            Column("Bytes", ".status.bytes", "integer", wide=True),
            Column("Job", ".status.job.name"),
            MESSAGE,
            AGE,
        ),
        selectable=(".spec.source.jobRef.name", ".spec.source.save.jobRef.name", ".spec.pinned"),
    ),
    KindInfo(
        model=InferenceDeployment,
        plural="inferencedeployments",
        short_name="infd",
        max_name=36,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Ready", ".status.ready"),
            Column("Step", ".status.currentCheckpoint.step", "integer"),
            Column("Endpoint", ".status.endpoint"),
            Column("Revision", ".status.currentRevision", wide=True),
            MESSAGE,
            AGE,
        ),
        selectable=(".spec.model.checkpointRef.name", ".spec.model.checkpointSelector.jobRef.name"),
    ),
    KindInfo(
        model=EnginePool,
        plural="enginepools",
        short_name="epool",
        max_name=49,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Desired", ".spec.replicas", "integer"),
            Column("Ready", ".status.readyReplicas", "integer"),
            Column("Updated", ".status.updatedReplicas", "integer"),
            MESSAGE,
            AGE,
        ),
        scale=True,
    ),
)


def definition(info: KindInfo) -> dict[str, Any]:
    """Generate the whole CustomResourceDefinition of one kind.

    Raises:
        NotStructural: a type has no structural schema, or a limit is missing; the message lists the places.
    """
    schema = _schema(info)
    if found := list(lint.problems(schema)):
        raise NotStructural(f"{info.kind}: " + "; ".join(found))
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{info.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": info.kind,
                "listKind": f"{info.kind}List",
                "plural": info.plural,
                "singular": info.kind.lower(),
                "shortNames": [info.short_name],
                "categories": ["stoker"],
            },
            "versions": [_version(info, schema)],
        },
    }


def _version(info: KindInfo, schema: dict[str, Any]) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if info.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    found = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in info.columns],
        "subresources": subresources,
        "schema": {"openAPIV3Schema": schema},
    }
    if info.selectable:
        found["selectableFields"] = [{"jsonPath": path} for path in info.selectable]
    return found


def _column(column: Column) -> dict[str, Any]:
    found: dict[str, Any] = {"name": column.name, "jsonPath": column.path, "type": column.type}
    return {**found, "priority": 1} if column.wide else found


def _schema(info: KindInfo) -> dict[str, Any]:
    """Build the schema of a whole object.

    apiVersion, kind and metadata are Kubernetes' own, and a CRD may only narrow the name.
    Rules of the kind itself stay at the top, where alone CEL sees `metadata.name`.
    """
    members = structural_schema(info.model)
    spec = {key: value for key, value in members["properties"]["spec"].items() if key != "default"}
    name = {"type": "string", "maxLength": info.max_name, "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$"}
    own = {key: value for key, value in members.items() if key == "x-kubernetes-validations"}
    return {
        "type": "object",
        "description": members["description"],
        **without_fallbacks(own),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": without_fallbacks(spec),
            "status": status_schema(members["properties"]["status"]),
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes small parts on one line, and quotes text that some YAML readers take for a number (`1e-5`)."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (the same schema in two places is written twice)
        return True

    def represent_object(self, found: dict[str, Any]) -> yaml.MappingNode:
        return self.represent_mapping("tag:yaml.org,2002:map", found.items(), flow_style=len(str(found)) <= _LINE)

    def represent_text(self, found: str) -> yaml.ScalarNode:
        style = "'" if re.match(r"[-+]?\.?[0-9]", found) else '"' if "'" in found else None
        return self.represent_scalar("tag:yaml.org,2002:str", found, style=style)

    def represent_items(self, found: list[Any]) -> yaml.SequenceNode:
        return self.represent_sequence(
            "tag:yaml.org,2002:seq", found, flow_style=not any(isinstance(item, dict) for item in found)
        )


_LINE = 5000
_Dumper.add_representer(dict, _Dumper.represent_object)
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_items)


def text(info: KindInfo) -> str:
    """Return the content of the kind's file."""
    found: str = yaml.dump(definition(info), Dumper=_Dumper, sort_keys=False, width=4000, allow_unicode=True)
    return f"# Generated by `python -m stoker.operator.api.crd --write crds`; change the types instead.\n{found}"


def room(info: KindInfo) -> int:
    """Bytes that the kind's CRD may still grow by, as file or as JSON, whichever is larger."""
    return lint.max_bytes(info.kind) - max(
        len(text(info).encode()), len(json.dumps(definition(info), separators=(",", ":")))
    )


def write(folder: Path) -> list[Path]:
    """Write every CRD into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / info.file_name for info in KIND_INFOS]
    for info, path in zip(KIND_INFOS, paths, strict=True):
        path.write_text(text(info), encoding="utf-8")
    return paths


def drift(folder: Path) -> list[str]:
    """Return the names of files that differ from the types, or that belong to no kind."""
    wanted = {info.file_name: text(info) for info in KIND_INFOS}
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob(f"{GROUP}_*.yaml")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stoker.operator.api.crd", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", metavar="FOLDER", type=Path, help="write the CRDs")
    mode.add_argument("--check", metavar="FOLDER", type=Path, help="exit 1 when a file there is out of date")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        write(chosen.write)
        for info in KIND_INFOS:
            limit = lint.max_bytes(info.kind)
            sys.stdout.write(f"{chosen.write / info.file_name}: {room(info):,} of {limit:,} bytes are left\n")
        return 0
    stale = drift(chosen.check)
    for name in stale:
        sys.stderr.write(
            f"{chosen.check / name} is out of date: run python -m stoker.operator.api.crd --write {chosen.check}\n"
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
