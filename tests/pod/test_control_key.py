"""Control tokens: one pod, one method, one path, one body, once, within a minute."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jwt
import pytest

from stoker.pod.control_key import LIFETIME_S, ControlDenied, ControlVerifier, new_private_key, public_key, sign

NOW = 1_000_000.0
KEY = new_private_key()
OTHER_KEY = new_private_key()
CALL = {"pod_uid": "pod-1", "method": "POST", "path": "/drain", "body": b"{}"}


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(tmp_path: Path, clock: Clock) -> ControlVerifier:
    (tmp_path / "current.pem").write_bytes(public_key(KEY))
    return ControlVerifier(tmp_path, "pod-1", clock)


def token(key: bytes = KEY, *, now: float = NOW, token_id: str = "t-1", **changes: Any) -> str:
    return sign(key, now=now, token_id=token_id, **(CALL | changes))


def check(verifier: ControlVerifier, text: str, **changes: Any) -> None:
    call = CALL | changes
    verifier.verify(text, call["method"], call["path"], call["body"])


def test_the_right_call_is_accepted_once(verifier: ControlVerifier) -> None:
    text = token()
    check(verifier, text)
    with pytest.raises(ControlDenied, match="used before"):
        check(verifier, text)
    check(verifier, token(token_id="t-2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pod_uid": "pod-2"}, "aud is for another call"),
        ({"method": "PUT"}, "method is for another call"),
        ({"path": "/checkpoint"}, "path is for another call"),
        ({"body": b'{"id":"x"}'}, "sha256 is for another call"),
    ],
)
def test_a_token_for_another_call_is_refused(verifier: ControlVerifier, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ControlDenied, match=message):
        check(verifier, token(**changes))


def test_a_refused_call_does_not_use_the_token_up(verifier: ControlVerifier) -> None:
    text = token()
    with pytest.raises(ControlDenied):
        check(verifier, text, body=b"forged")
    check(verifier, text)


@pytest.mark.parametrize(
    ("age_s", "accepted"),
    [(0, True), (LIFETIME_S, True), (LIFETIME_S + 1, False), (-LIFETIME_S, True), (-LIFETIME_S - 1, False)],
)
def test_a_token_is_good_for_a_minute_and_clocks_may_differ_by_one(
    verifier: ControlVerifier, clock: Clock, age_s: int, accepted: bool
) -> None:
    clock.now = NOW + age_s
    if accepted:
        check(verifier, token())
    else:
        with pytest.raises(ControlDenied, match="expired"):
            check(verifier, token())


def test_a_used_token_stays_used_as_long_as_it_could_be_valid(verifier: ControlVerifier, clock: Clock) -> None:
    text = token()
    clock.now = NOW - LIFETIME_S
    check(verifier, text)
    for later in range(-LIFETIME_S, LIFETIME_S + 1, 5):
        clock.now = NOW + later
        with pytest.raises(ControlDenied, match="used before"):
            check(verifier, text)


def claims(**changes: Any) -> dict[str, Any]:
    values = {
        "aud": "pod-1",
        "method": "POST",
        "path": "/drain",
        "sha256": hashlib.sha256(b"{}").hexdigest(),
        "iat": int(NOW),
        "exp": int(NOW) + LIFETIME_S,
        "jti": "x",
    }
    return {name: value for name, value in (values | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exp": int(NOW) + 10 * LIFETIME_S}, "expired"),
        ({"exp": None}, 'missing the "exp" claim'),
        ({"jti": None}, 'missing the "jti" claim'),
        ({"aud": ["pod-1"]}, "aud is for another call"),
        ({"iat": float(NOW)}, "must be whole seconds"),
        ({"exp": str(int(NOW))}, "must be whole seconds"),
    ],
)
def test_a_signed_token_with_odd_claims_is_refused(
    verifier: ControlVerifier, changes: dict[str, Any], message: str
) -> None:
    text = jwt.encode(claims(**changes), KEY.decode(), algorithm="EdDSA")
    with pytest.raises(ControlDenied, match=message):
        check(verifier, text)


def test_a_token_of_an_unknown_key_is_refused(verifier: ControlVerifier) -> None:
    with pytest.raises(ControlDenied, match="no known key"):
        check(verifier, token(OTHER_KEY))


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "é", "." * 100_000])
def test_text_that_is_no_token_is_refused(verifier: ControlVerifier, text: str) -> None:
    with pytest.raises(ControlDenied, match="not a control token"):
        check(verifier, text)


def test_other_algorithms_are_refused(verifier: ControlVerifier) -> None:
    unsigned = jwt.encode(claims(), key="", algorithm="none")
    symmetric = jwt.encode(claims(), key="s" * 64, algorithm="HS256")
    for text in (unsigned, symmetric):
        with pytest.raises(ControlDenied, match="not a control token"):
            check(verifier, text)


def test_keys_are_rotated_without_a_restart(verifier: ControlVerifier, tmp_path: Path) -> None:
    (tmp_path / "next.pem").write_bytes(public_key(OTHER_KEY))
    check(verifier, token(OTHER_KEY, token_id="t-2"))
    check(verifier, token(KEY, token_id="t-3"))
    (tmp_path / "current.pem").unlink()
    with pytest.raises(ControlDenied, match="no known key"):
        check(verifier, token(KEY, token_id="t-4"))
    check(verifier, token(OTHER_KEY, token_id="t-5"))


def test_a_file_that_is_no_key_does_not_hide_the_right_one(verifier: ControlVerifier, tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("garbage")
    (tmp_path / "b.pem").symlink_to(tmp_path / "gone")
    (tmp_path / "c.pem").mkdir()
    check(verifier, token())


def test_without_keys_nothing_is_accepted(tmp_path: Path, clock: Clock) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ControlDenied, match="no known key"):
            check(ControlVerifier(folder, "pod-1", clock), token())
