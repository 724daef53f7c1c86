"""The OpenAPI document of an engine is true."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.http.api_document import openapi_document
from testing.engine.serving import serving
from testing.openapi.fuzz import fuzz, labels
from testing.openapi.send import Sender, opened

DOCUMENT = openapi_document("0.1")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    """A server over a fake core, on a real port."""
    with opened(_engine(tmp_path_factory.mktemp("engine"))) as send:
        yield send


@asynccontextmanager
async def _engine(folder: Path) -> Any:
    async with serving(folder) as found:
        yield found.http


@pytest.mark.parametrize("label", labels(DOCUMENT))
def test_every_answer_is_documented(engine: Sender, label: str) -> None:
    seen = fuzz(DOCUMENT, label, engine)
    takes_input = "{" in label or "requestBody" in DOCUMENT["paths"][label.split()[1]][label.split()[0].lower()]
    assert 200 in seen or takes_input or label == "POST /v1/embeddings", seen
