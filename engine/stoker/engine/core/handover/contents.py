"""The seeds of a prompt's blocks: what binds a block's checksum to its place and to all tokens up to its end."""

from __future__ import annotations

from stoker.engine.transfer.checksum import content_seed
from stoker.engine.transfer.fingerprint import content_digest, root_digest, salted_root


class BlockSeeds:
    """Seeds by index, computed as far as they are needed."""

    def __init__(self, fingerprint: bytes, prompt: tuple[int, ...], block_size: int, salt: bytes = b"") -> None:
        """`salt`: the request's (`salt_digest`)."""
        self._fingerprint, self._prompt, self._size = fingerprint, prompt, block_size
        self._root = salted_root(root_digest(fingerprint), salt)
        self._digests: list[bytes] = []

    def __call__(self, index: int) -> int:
        while len(self._digests) <= index:
            start = len(self._digests) * self._size
            parent = self._digests[-1] if self._digests else self._root
            self._digests.append(content_digest(parent, self._prompt[start : start + self._size]))
        return content_seed(self._fingerprint, index, self._digests[index])
