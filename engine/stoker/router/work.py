"""The estimate of what a request will cost: its prompt's length, its beginning, its session. Bodies are not parsed.

Pure; made by `Proxy` for policies that look at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.router.prefix_index import chain_of

BYTES_PER_TOKEN = 4
SESSION_HEADER = b"x-session-id"
MAX_SESSION_BYTES = 256
_PROMPTS = (b'"messages"', b'"prompt"', b'"input"')
"""Keys behind which a prompt begins. Fields before it differ between requests with the same prompt."""
_SALT = re.compile(rb'"cache_salt"\s*:\s*"((?:[^"\\]|\\.)+)"')
_USER = re.compile(rb'"user"\s*:\s*"((?:[^"\\]|\\.){1,256})"')
SEARCHED_BYTES = 4096
"""Where fields are looked for: at the begin of a body, `user` also at its end."""


@dataclass(frozen=True)
class Work:
    """One request, as far as a router knows it."""

    tokens: int = 0
    """Tokens of the prompt, about."""
    chain: tuple[int, ...] = ()
    """Keys of its beginnings, each one piece longer."""
    session: bytes = b""
    """Requests of one session are likely to have the same beginning."""
    may_split: bool = False
    """Whether another engine could compute the prompt: not for what has none, and not for the rest of a stream."""


NO_WORK = Work()


def work_of(body: bytes, headers: Iterable[tuple[bytes, bytes]], *, may_split: bool = False) -> Work:
    """Estimate the work of a request."""
    begin, salt = prompt_begin(body), salt_of(body)
    tokens, chain = (len(body) - begin) // BYTES_PER_TOKEN, chain_of(body, begin, salt)
    session = session_of(body, headers)
    if session and salt:
        session += b" %x" % hash(salt)  # of a bounded length: sessions are remembered
    return Work(tokens, chain, session, may_split)


def prompt_begin(body: bytes) -> int:
    """Where the first of the keys is behind which a prompt begins; 0 without one."""
    begin = -1
    for key in _PROMPTS:
        found = body.find(key, 0, begin if begin >= 0 else SEARCHED_BYTES)
        begin = found if found >= 0 else begin
    return max(begin, 0)


def salt_of(body: bytes) -> bytes:
    """The request's `cache_salt` as it stands in the body, wherever that is; empty without one.

    Within a text its name would have escaped quotes. A key of this name in a nested object is taken for the request's.
    The last one counts, as in JSON; from the end Python also searches in half the time.
    """
    begin = body.rfind(b'"cache_salt"')
    found = _SALT.match(body, begin) if begin >= 0 else None
    return found[1] if found is not None else b""


def session_of(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The session that the client names by `X-Session-Id`, or by the field `user`; empty without one."""
    named = next((value for key, value in headers if key == SESSION_HEADER), b"")
    if named:
        return named[:MAX_SESSION_BYTES]
    found = _USER.search(body, 0, SEARCHED_BYTES) or _USER.search(body, max(len(body) - SEARCHED_BYTES, 0))
    return found[1] if found is not None else b""
