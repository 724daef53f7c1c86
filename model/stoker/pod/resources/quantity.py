"""Amounts of Kubernetes resource quantities as whole numbers, so that they add up exactly."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, InvalidOperation

_SUFFIXES = {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
    **{suffix: Decimal(1000) ** -power for power, suffix in enumerate(("m", "u", "n"), 1)},
}


def amount(resource: str, quantity: str | int | float) -> int:
    """Return thousandths of `cpu`, else whole units (bytes, GPUs), rounded up.

    Raises:
        ValueError: no quantity.
    """
    text = str(quantity)
    number = text.rstrip("kKMGTPEimun") if text[-1:].isalpha() else text
    suffix = text[len(number) :]
    try:
        value = Decimal(number) * _SUFFIXES[suffix]
    except (InvalidOperation, KeyError):
        raise ValueError(f"{resource}: {quantity!r} is no quantity (allowed: 2, 500m, 16Gi)") from None
    return int((value * 1000 if resource == "cpu" else value).to_integral_value(ROUND_CEILING))


def amounts(quantities: Mapping[str, str | int | float]) -> dict[str, int]:
    """Return the amount of each resource."""
    return {resource: amount(resource, quantity) for resource, quantity in quantities.items()}
