"""The parameters to which weight decay applies, by the Hugging Face names of their tensors.

Pure; called by `build` before the buckets are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from stoker.model.parameter import Part
from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import NO_DECAY
from stoker.trainer.rank.bucket import Decays


def decay_by_name(parts: Iterable[Part], patterns: Sequence[str], whole_names: Sequence[str] | None = None) -> Decays:
    """The rule that parameters whose tensors match one of the patterns do not decay.

    `whole_names`: the tensors of the whole model, where `parts` are those of some of its layers.

    Raises:
        ConfigError: a pattern matches no tensor, or only some of the tensors of one fused parameter.
    """
    by_parameter: dict[int, list[str]] = {}
    for part in parts:
        by_parameter.setdefault(id(part.parameter), []).append(part.hf_name)
    _check_patterns(patterns, whole_names or [name for names in by_parameter.values() for name in names])
    undecayed = {key for key, names in by_parameter.items() if _matches_all(names, patterns)}

    def decays(parameter: nn.Parameter) -> bool:
        return id(parameter) not in undecayed

    return decays


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if pattern not in NO_DECAY and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"optimization.noDecay {pattern!r} matches no tensor of the model; its tensors have names like "
                f"{names[0]}, {names[-1]}"
            )


def _matches_all(names: Sequence[str], patterns: Sequence[str]) -> bool:
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if found and len(found) < len(names):
        raise ConfigError(
            f"optimization.noDecay {', '.join(patterns)} matches {', '.join(found)} alone; the tensors "
            f"{', '.join(names)} are one parameter, so allowed: all of them or none"
        )
    return bool(found)
