"""The secret by which engines of a deployment, or pods of a replica, know each other, read from its file."""

from __future__ import annotations

from pathlib import Path

from stoker.pod.config_file import ConfigError


def read_key(path: str, field: str = "transfer.key_file") -> bytes:
    """Return the 32 bytes of a key file. Raises ConfigError, which names the field."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field} {path}: {error.strerror}") from error
    key = content if len(content) == 32 else _of_digits(content)
    if len(key) != 32 or not any(key):
        needed = "32 bytes that are not all zero, or 64 hexadecimal digits, are needed"
        raise ConfigError(f"{field} {path}: {needed}, got a file of {len(content)} bytes")
    return key


def _of_digits(content: bytes) -> bytes:
    """Return the bytes that hexadecimal digits stand for; none where the content is something else."""
    try:
        return bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        return b""
