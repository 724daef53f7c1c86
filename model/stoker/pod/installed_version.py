"""The version of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NOT_INSTALLED = "source"


def installed_version() -> str:
    """The installed version, or `source` where the sources are on Python's path and nothing is installed."""
    try:
        return version("stoker")
    except PackageNotFoundError:
        return NOT_INSTALLED
