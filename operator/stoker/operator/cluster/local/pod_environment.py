"""The environment and the command of a pod's container, before they are rewritten for this machine. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stoker.operator.cluster.local.volumes import MountError, data_of
from stoker.operator.domain.plan import Key, Object
from stoker.pod.resources.quantity import amount

Find = Callable[[Key], Object | None]

FROM_NODE = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TERM|VIRTUAL_ENV|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|DYLD_\w+|CUDA_(HOME|PATH)|XDG_\w+|SSL_CERT_\w+"
    r"|\w+_proxy|\w+_PROXY|HF_\w+|TRITON_\w+|TORCH\w*|STOKER_CACHE|OMP_NUM_THREADS|MKL_NUM_THREADS"
)
"""Variables of the supervisor that every pod inherits: those that an image would bring."""


def node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that every pod inherits from this machine."""
    return {name: value for name, value in environment.items() if FROM_NODE.fullmatch(name)}


def container_environment(pod: Object, ip: str, find: Find, cores: int) -> dict[str, str]:
    """Collect the pod's own variables: `envFrom`, then `env`, with `$(NAME)` expanded.

    Args:
        cores: of the machine; a larger limit gives no more threads.

    Raises:
        MountError: a ConfigMap, Secret or key is missing.
    """
    container = pod["spec"]["containers"][0]
    variables: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        variables |= _all_of(pod, source, find)
    for variable in container.get("env") or ():
        value = _value(pod, variable, ip, find)
        if value is not None:
            variables[variable["name"]] = expand(value, variables)
    cpus = (container.get("resources") or {}).get("limits", {}).get("cpu")
    if cpus is not None:
        threads = math.ceil(amount("cpu", cpus) / 1000)
        variables.setdefault("OMP_NUM_THREADS", str(max(1, min(threads, cores))))
    return variables


def container_command(pod: Object, variables: Mapping[str, str]) -> list[str]:
    """Build the command with its arguments, `$(NAME)` expanded."""
    container = pod["spec"]["containers"][0]
    return [expand(str(word), variables) for word in (*container["command"], *(container.get("args") or ()))]


def with_interpreter(words: Sequence[str], python: str) -> list[str]:
    """Replace `python` by this machine's interpreter.

    Called after rewriting: the path of the interpreter may begin with a path that the pod mounts.
    """
    return [python if words[0] in ("python", "python3") else words[0], *words[1:]]


def environment_sources(pod: Object) -> set[Key]:
    """List the ConfigMaps and Secrets that the variables come from."""
    namespace = pod["metadata"]["namespace"]
    container = pod["spec"]["containers"][0]
    references = [*(container.get("envFrom") or ()), *((v.get("valueFrom") or {}) for v in container.get("env") or ())]
    return {Key(kind, namespace, name) for kind, name in _named(references)}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` of known variables and `$$` by one dollar sign; unknown names stay."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)", replace, text)


_FIELDS: dict[str, Callable[[Object, str], str]] = {
    "metadata.name": lambda pod, _: str(pod["metadata"]["name"]),
    "metadata.namespace": lambda pod, _: str(pod["metadata"]["namespace"]),
    "metadata.uid": lambda pod, _: str(pod["metadata"]["uid"]),
    "spec.nodeName": lambda pod, _: str(pod["spec"].get("nodeName", "")),
    "spec.serviceAccountName": lambda pod, _: str(pod["spec"].get("serviceAccountName", "default")),
    "status.podIP": lambda _, ip: ip,
    "status.hostIP": lambda _, ip: ip,
}


def _value(pod: Object, variable: Mapping[str, Any], ip: str, find: Find) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return str(variable.get("value") or "")
    if "fieldRef" in source:
        return _field(pod, str(source["fieldRef"]["fieldPath"]), ip)
    for kind, name in _named([source]):
        reference: Mapping[str, Any] = source["configMapKeyRef" if kind == "ConfigMap" else "secretKeyRef"]
        found = find(Key(kind, pod["metadata"]["namespace"], name))
        data = data_of(found) if found else {}
        if reference["key"] in data:
            return data[reference["key"]].decode()
        if reference.get("optional"):
            return None
        raise MountError(
            f'{kind.lower()} "{name}" has no key "{reference["key"]}"'
            if found
            else f'{kind.lower()} "{name}" not found'
        )
    raise MountError(f"not supported yet: env {variable['name']} from {', '.join(source)}")


def _field(pod: Object, path: str, ip: str) -> str:
    if path in _FIELDS:
        return _FIELDS[path](pod, ip)
    found = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if found is None:
        raise MountError(f"not supported yet: fieldRef {path}")
    return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))


def _all_of(pod: Object, source: Mapping[str, Any], find: Find) -> dict[str, str]:
    prefix = source.get("prefix", "")
    for kind, name in _named([source]):
        found = find(Key(kind, pod["metadata"]["namespace"], name))
        if found is not None:
            return {f"{prefix}{key}": value.decode() for key, value in data_of(found).items()}
        if not (source.get("configMapRef") or source.get("secretRef") or {}).get("optional"):
            raise MountError(f'{kind.lower()} "{name}" not found')
    return {}


def _named(references: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    kinds = {
        "configMapRef": "ConfigMap",
        "configMapKeyRef": "ConfigMap",
        "secretRef": "Secret",
        "secretKeyRef": "Secret",
    }
    for reference in references:
        for field, kind in kinds.items():
            if field in reference:
                yield kind, str(reference[field]["name"])
