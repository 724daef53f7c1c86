"""Capabilities of this version: one table row for each API or configuration field that is not built in full.

Operator, trainer, engine and kernels refuse by it; admission accepts such a spec (`domain/unsupported`). README and the
API reference print their "not yet" from it (`python -m stoker.operator.api.not_yet`). A field without a row works with
every value that its schema allows. To release a feature, change its row: `tests/operator/test_contract_capabilities.py`
finds what then disagrees.

No torch is imported here, so every program can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stoker.pod.field_names import manifest_name

KernelsName = Literal["reference", "compiled", "fused"]
AttentionName = Literal["stoker", "sdpa", "flash", "cudnn"]
ContextMethod = Literal["AllGather", "Ring", "Ulysses"]


@dataclass(frozen=True)
class Row:
    """The values that work in one field."""

    values: tuple[object, ...] = ()
    """The allowed values; none: the field must be left out."""
    instead: str = ""
    """For a field that must be left out: what to use in its place."""

    def allows(self, value: Any) -> bool:
        """Whether this version can do what the value asks for. An absent value asks for nothing."""
        if value in (None, {}, [], ""):
            return True
        return value in self.values

    @property
    def hint(self) -> str:
        """Advice to the user, for the end of a message."""
        if self.values:
            return f"allowed: {', '.join(map(shown, self.values))}"
        return f"use {self.instead}" if self.instead else "leave it out"


def only(*values: object) -> Row:
    """The row of a field of which these values are built."""
    return Row(values)


def absent(instead: str = "") -> Row:
    """The row of a field that is not built at all."""
    return Row(instead=instead)


ATTENTION: Mapping[tuple[KernelsName, bool], tuple[AttentionName, ...]] = {
    ("reference", False): ("sdpa",),
    ("reference", True): ("stoker",),
    ("compiled", False): ("sdpa",),
    ("fused", False): ("flash", "cudnn", "stoker"),
    ("fused", True): ("stoker",),
}
"""(kernels, deterministic) -> attention over packed sequences (the trainer's). `auto` is the first that this machine
and the data type allow: flash-attn-4 may be missing, float32 is for `stoker` alone, and cuDNN's backward does not
repeat bitwise. `cudnn` computes documents of one length; others, and windows, are `stoker`'s."""

CONTEXT_ATTENTION: Mapping[ContextMethod, tuple[AttentionName, ...]] = {
    "AllGather": ("sdpa", "stoker"),
    "Ring": ("sdpa", "stoker"),
    "Ulysses": ("sdpa", "stoker", "flash", "cudnn"),
}
"""How ranks of `parallelism.context` exchange keys -> attention that can do it: the first two need kernels of ours,
whose queries attend to keys of other ranks, and whose log-sums can be merged."""

PAGED_ATTENTION: Mapping[tuple[KernelsName, bool], tuple[AttentionName, ...]] = {
    ("reference", False): ("sdpa",),
    ("reference", True): ("stoker",),
    ("compiled", False): ("sdpa",),
    ("fused", False): ("stoker", "flash"),
    ("fused", True): ("stoker",),
}
"""(kernels, deterministic) -> attention over the cache (the engine's); `auto` is the first. `flash` is flash-attn-4 for
long prompts, which must be installed, and our own kernels for all else."""

_KERNELS = only("auto", "reference", "fused")
_PACKED = tuple(dict.fromkeys(name for names in ATTENTION.values() for name in names))
_PAGED = tuple(dict.fromkeys(name for names in PAGED_ATTENTION.values() for name in names))

_TRAINER: Mapping[str, Row] = {
    "kernels": _KERNELS,
    "attention": only("auto", *_PACKED),
    "optimization.optimizer": only("adam", "adamw", "lamb"),
    "memory.precision": only("fp32", "fp16", "bf16", "fp8"),
    "memory.fp8_recipe": only("Tensorwise", "Rowwise"),
    "memory.zero_stage": only(0, 1, 2, 3),
    "memory.activation_checkpointing": only("none", "selective", "full"),
    "memory.cpu_offload": only(False, True),
}
_ENGINE: Mapping[str, Row] = {
    "kernels": _KERNELS,
    "attention": only("auto", *_PAGED),
}
_ROUTER: Mapping[str, Row] = {}

CAPABILITIES: Mapping[str, Mapping[str, Row]] = {
    "trainer": _TRAINER,
    "engine": _ENGINE,
    "router": _ROUTER,
    "TrainingJob": {
        "runtime.kernels": _TRAINER["kernels"],
        "runtime.attention": _TRAINER["attention"],
        **{manifest_name(path): row for path, row in _TRAINER.items() if "." in path},
    },
    "Checkpoint": {},
    "InferenceDeployment": {
        "engine.kernels": _ENGINE["kernels"],
        "engine.attention": _ENGINE["attention"],
        **{f"pools[].{path}": row for path, row in _ENGINE.items() if path.startswith("parallelism.")},
    },
    "EnginePool": {},
}
"""Program or kind -> path -> what works. Programs have the names of their configuration, kinds those below `spec`."""

BESIDE_ROLES: Mapping[str, Row] = {
    "engine.cache.prefixCache": only(True),
}
"""Rows of an InferenceDeployment with prefill and decode pools, beside those above.

Blocks travel from the ranks of one copy of the model to those of another, and land in the prefix cache.
"""


OF_BOTH_OFFLOADS = (
    f" with {manifest_name('memory.nvme_offload')}: both take the whole state; `stoker plan` shows its size"
)
"""Why an optimizer's state is in one place: in host memory, or in a file with buffers in host memory."""


def refusals(program: str, config: Any, root: str = "") -> list[str]:
    """One line for each field that asks for what is not built, with its value and what is allowed.

    Args:
        program: a key of `CAPABILITIES`.
        config: nested mappings or objects with the members of the paths; an absent member asks for nothing.
        root: what the paths in the messages start with, for instance `spec`.
    """
    rows = {path: (row, "") for path, row in CAPABILITIES[program].items()}
    offload = _own_path(program, "memory.nvme_offload")
    if program in ("trainer", "TrainingJob") and _value_at(config, offload, None) is not None:
        rows[_own_path(program, "memory.cpu_offload")] = only(False), OF_BOTH_OFFLOADS
    has_roles = program == "InferenceDeployment" and any(
        role != "colocated" for _, role in values_at(config, "pools[].role")
    )
    if has_roles:
        rows |= {path: (row, " with prefill and decode pools") for path, row in BESIDE_ROLES.items()}
    if program in _WITH_KERNELS:
        rows |= _kernels_row(program, config)
        rows |= _attention_row(program, config)
    if program in _OF_TRAINER:
        rows |= _context_attention_row(program, config, rows)
    found = _refused(config, rows, root, manifest_name if program == "trainer" else str)
    if program in _WITH_PODS:
        found += [
            line for where, pool in values_at(config, _WITH_PODS[program], root) for line in _of_pods(where, pool)
        ]
    return found


_WITH_PODS = {"InferenceDeployment": "pools[]", "EnginePool": "revisions[].template"}
"""Kind -> path of what has `podsPerReplica`."""


def _of_pods(where: str, pool: Any) -> list[str]:
    """A line for a replica of several pods that cannot share its data-parallel ranks."""
    pods = _value_at(pool, "podsPerReplica", 1)
    name = "parallelism.data" if _value_at(pool, "parallelism", None) is not None else "config.parallelism.data"
    data = _value_at(pool, name, 1)
    if data % pods == 0 or pods % data == 0:
        return []
    condition = f"is not supported yet with podsPerReplica {pods}"
    return [f"{where}.{name} {data} {condition}; allowed: 1, its divisors and multiples"]


def _refused(
    config: Any, rows: Mapping[str, tuple[Row, str]], root: str, named: Callable[[str], str] = str
) -> list[str]:
    """The lines for the fields whose values the rows do not allow. `named`: a path as messages have it."""
    return [
        f"{named(where)}{_value(value)} is not supported yet{condition}; {row.hint}"
        for path, (row, condition) in rows.items()
        for where, value in values_at(config, path, root)
        if not row.allows(value)
    ]


def _own_path(program: str, path: str) -> str:
    return manifest_name(path) if program == "TrainingJob" else path


def values_at(config: Any, path: str, root: str = "") -> Iterator[tuple[str, Any]]:
    """(full path, value) at a path: none where it is absent, one for each item of a list (`pools[].role`)."""
    name, _, rest = path.partition(".")
    found = _member(config, name.removesuffix("[]"))
    where = f"{root}.{name.removesuffix('[]')}" if root else name.removesuffix("[]")
    items = [(where, found)]
    if name.endswith("[]"):
        items = [(f"{where}[{_member(item, 'name') or index}]", item) for index, item in enumerate(found or ())]
    for place, item in items:
        if item is not None:
            yield from values_at(item, rest, place) if rest else [(place, item)]


def shown(value: object) -> str:
    """A value as a manifest writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(value: Any) -> str:
    return f" {shown(value)}" if isinstance(value, bool | int | str) else ""


_WITH_KERNELS = {
    "TrainingJob": ("runtime", "training.deterministic"),
    "InferenceDeployment": ("engine", "engine.deterministic"),
}
"""Kind -> section with kernels and attention, and the field for determinism."""


_KERNELS_OF_DEVICE: Mapping[str, KernelsName] = {"cpu": "reference", "cuda": "fused"}
"""Device -> kernels of `auto`. An engine on CPUs may take `compiled` ones, which have the attention of `reference`."""


def _kernels_row(kind: str, config: Any) -> dict[str, tuple[Row, str]]:
    """The row of kernels on CPUs; none where the device is chosen when the program starts."""
    section, _ = _WITH_KERNELS[kind]
    if _value_at(config, f"{section}.device", "auto") != "cpu":
        return {}
    return {f"{section}.kernels": (only("auto", "reference"), f" with {section}.device cpu")}


def _attention_row(kind: str, config: Any) -> dict[str, tuple[Row, str]]:
    """The row of attention for chosen kernels, or for those of a chosen device; none where both are `auto`."""
    section, field = _WITH_KERNELS[kind]
    kernels, device = (_value_at(config, f"{section}.{name}", "auto") for name in ("kernels", "device"))
    deterministic = _value_at(config, field, "Off")
    chosen: Any = _KERNELS_OF_DEVICE.get(device) if kernels == "auto" else kernels
    key = chosen, deterministic not in (False, "Off")
    if key not in ATTENTION:
        return {}
    choices = ATTENTION[key] if kind == "TrainingJob" else PAGED_ATTENTION[key]
    condition = f" with {section}.device {device}" if kernels == "auto" else f" with {section}.kernels {kernels}"
    condition += f" and {field} {shown(deterministic)}" if key[1] else ""
    return {f"{section}.attention": (only("auto", *choices), condition)}


_OF_TRAINER = {"trainer": ("attention", "context_method"), "TrainingJob": ("runtime.attention", "contextMethod")}
"""Program or kind -> the paths of the attention and of the method of context parallelism."""


def _context_attention_row(
    program: str, config: Any, rows: Mapping[str, tuple[Row, str]]
) -> dict[str, tuple[Row, str]]:
    """The row of attention where several ranks share a sequence; none where the other row is narrow enough."""
    path, field = _OF_TRAINER[program]
    ranks, method = (_value_at(config, f"parallelism.{name}", 1) for name in ("context", field))
    if ranks == 1 or method not in CONTEXT_ATTENTION:
        return {}
    row, condition = rows[path]
    values = tuple(value for value in row.values if value in ("auto", *CONTEXT_ATTENTION[method]))
    if values == row.values:
        return {}
    beside = f"{condition} and" if condition else " with"
    return {path: (only(*values), f"{beside} parallelism.context {ranks} and {manifest_name(field)} {method}")}


def _value_at(config: Any, path: str, default: Any) -> Any:
    return next((value for _, value in values_at(config, path)), default)


def _member(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
