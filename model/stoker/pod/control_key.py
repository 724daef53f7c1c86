"""Control tokens: short-lived EdDSA JWTs that authorise one save, drain, backends or status call of the operator.

A token names one pod, one method, one path and one body, and is accepted once.

The operator signs (`key_ring`, `pod_http`); `http` verifies on its control routes in trainer, engine and router. A
verifier's only state is the set of tokens that it has accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LIFETIME_S = 60
ALGORITHM = "EdDSA"


class ControlDenied(Exception):
    """The token does not allow this call; the message names what is wrong with it."""


def new_private_key() -> bytes:
    """Generate an Ed25519 private key, as PKCS#8 PEM."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_key(private_pem: bytes) -> bytes:
    """Return the public half of a key as SubjectPublicKeyInfo PEM, for the ConfigMap that pods mount."""
    key = serialization.load_pem_private_key(private_pem, password=None)
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def sign(private_pem: bytes, *, pod_uid: str, method: str, path: str, body: bytes, now: float, token_id: str) -> str:
    """Sign a token for one call. `now` is Unix time in seconds; `token_id` must never repeat."""
    claims = {
        "aud": pod_uid,
        "method": method,
        "path": path,
        "sha256": hashlib.sha256(body).hexdigest(),
        "iat": int(now),
        "exp": int(now) + LIFETIME_S,
        "jti": token_id,
    }
    return jwt.encode(claims, _private_key(private_pem), algorithm=ALGORITHM)


@lru_cache(maxsize=2)  # the key in use, and the one before it while a rotation is under way
def _private_key(private_pem: bytes) -> Ed25519PrivateKey:
    """The key in a PEM text. Reading it costs more than a signature, and a poll of a thousand pods signs as often."""
    key = serialization.load_pem_private_key(private_pem, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise TypeError(f"a control key must be an Ed25519 key, not {type(key).__name__}")
    return key


class ControlVerifier:
    """Checks tokens against every public key in a folder. Keys are read at each check: a rotation needs no restart."""

    def __init__(self, keys_folder: Path | str, pod_uid: str, clock: Callable[[], float]) -> None:
        self.keys_folder = Path(keys_folder)
        self.pod_uid = pod_uid
        self.clock = clock
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def verify(self, token: str, method: str, path: str, body: bytes) -> None:
        """Accept a call once.

        Raises:
            ControlDenied: unknown key, other pod, other method, path or body, expired, or used before.
        """
        claims = self._claims(token)
        wanted = {"aud": self.pod_uid, "method": method, "path": path, "sha256": hashlib.sha256(body).hexdigest()}
        for name, value in wanted.items():
            if claims.get(name) != value:
                raise ControlDenied(f"the token's {name} is for another call")
        issued, expires, token_id = claims["iat"], claims["exp"], claims["jti"]
        if type(issued) is not int or type(expires) is not int or not isinstance(token_id, str):
            raise ControlDenied("the token's iat and exp must be whole seconds and its jti text")
        now = self.clock()
        if not issued - LIFETIME_S <= now <= expires <= issued + LIFETIME_S:
            raise ControlDenied("the token has expired")
        self._use(token_id, now)

    def _claims(self, token: str) -> dict[str, Any]:
        for public_pem in self._public_keys():
            try:
                return jwt.decode(
                    token,
                    public_pem,
                    algorithms=[ALGORITHM],
                    options={
                        "verify_aud": False,
                        "verify_exp": False,
                        "verify_iat": False,
                        "require": ["aud", "exp", "iat", "jti"],
                    },
                )
            except (jwt.InvalidSignatureError, jwt.InvalidKeyError):
                continue  # the other key signed it, or this file is no key
            except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
                raise ControlDenied(f"not a control token: {error}") from error
        raise ControlDenied("no known key signed the token")

    def _public_keys(self) -> list[bytes]:
        """Read the keys in the folder, without those that a rotation removes at this moment."""
        keys = []
        for key_file in sorted(self.keys_folder.glob("*.pem")):
            with contextlib.suppress(OSError):
                keys.append(key_file.read_bytes())
        return keys

    def _use(self, token_id: str, now: float) -> None:
        with self._lock:
            self._used = {used: at for used, at in self._used.items() if now - at <= 2 * LIFETIME_S}
            if token_id in self._used:
                raise ControlDenied("the token was used before")
            self._used[token_id] = now
