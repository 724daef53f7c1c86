"""Image identity: the digest in a registry from an image reference and a kubelet's `imageID`."""

from __future__ import annotations

import pytest

from stoker.operator.domain.image import pulled_digest

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("image", "image_id", "pulled"),
    [
        ("ghcr.io/a/runtime:0.1", f"ghcr.io/a/runtime@{DIGEST}", f"ghcr.io/a/runtime@{DIGEST}"),
        ("ghcr.io/a/runtime", f"docker-pullable://ghcr.io/a/runtime@{DIGEST}", f"ghcr.io/a/runtime@{DIGEST}"),
        ("registry:5000/runtime:1", f"registry:5000/runtime@{DIGEST}", f"registry:5000/runtime@{DIGEST}"),
        ("python:3.11", f"docker.io/library/python@{DIGEST}", f"docker.io/library/python@{DIGEST}"),
        ("org/app:1", f"docker.io/org/app@{DIGEST}", f"docker.io/org/app@{DIGEST}"),
        (f"ghcr.io/a/runtime@{DIGEST}", f"ghcr.io/a/runtime@{DIGEST}", f"ghcr.io/a/runtime@{DIGEST}"),
        ("ghcr.io/a/runtime:0.1", DIGEST, None),
        ("ghcr.io/a/runtime:0.1", f"docker.io/library/import-2026-01-01@{DIGEST}", None),
        ("ghcr.io/a/runtime:0.1", "", None),
        ("ghcr.io/a/runtime:0.1", "ghcr.io/a/runtime@md5:00", None),
    ],
    ids=["tag", "docker", "port", "library", "hub", "digest", "loaded by id", "imported", "embedded", "other hash"],
)
def test_a_digest_is_taken_from_the_same_repository_only(image: str, image_id: str, pulled: str | None) -> None:
    assert pulled_digest(image, image_id) == pulled
