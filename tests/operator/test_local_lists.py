"""Pages of the embedded cluster's lists, and the ends of its logs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.service.local.page_token import place_of, token_of
from stoker.operator.service.local.pod_log import read_tail

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=40)


@given(NAMES, NAMES, NAMES)
def test_a_token_leads_back_to_its_place_in_its_list_alone(listed: str, place: str, other: str) -> None:
    token = token_of(listed, place)
    assert place_of(listed, token) == place
    if other != listed:
        with pytest.raises(ValueError, match="the token is of the list"):
            place_of(other, token)


@given(st.text(max_size=80))
def test_any_other_text_is_refused(text: str) -> None:
    if not text:
        assert place_of("default/pods", text) == ""
        return
    with pytest.raises(ValueError, match="is no token of a page"):
        place_of("default/pods", text)


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t + "A", lambda t: f" {t}", lambda t: t.swapcase()])
def test_a_changed_token_is_refused(change: object) -> None:
    with pytest.raises(ValueError, match="continue"):
        place_of("default/pods", change(token_of("default/pods", "default/a")))  # type: ignore[operator]


@given(st.lists(st.sampled_from(["a", "b\rc", ""]), max_size=6), st.integers(0, 8), st.booleans())
def test_the_last_lines_are_those_between_line_feeds(lines: list[str], count: int, ended: bool) -> None:
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    shown = text.removesuffix("\n").split("\n") if text else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        file.write_bytes(text.encode())
        found = read_tail(file, count).decode()
    assert (found.removesuffix("\n").split("\n") if found else []) == (shown[-count:] if count else [])
