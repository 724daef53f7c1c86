"""The secret by which engines of a deployment, or pods of a replica, know each other, read from its file."""

from __future__ import annotations

from pathlib import Path

from stoker.pod.config_file import ConfigError


def read_key(path: str, field: str = "transfer.key_file") -> bytes:
    """Return the 32 bytes of a key file. Raises ConfigError, which names the field."""
    try:
        content = Path(path).read_bytes()
        key = content if len(content) == 32 else bytes.fromhex(content.decode("ascii").strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field} {path}: {error}") from error
    if len(key) != 32 or not any(key):
        raise ConfigError(f"{field} {path}: 32 bytes or 64 hexadecimal digits are needed, got {len(key)} bytes")
    return key
