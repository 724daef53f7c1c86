"""References to images, and the digest that a node pulled for one. Pure.

Called by the pinning of a TrainingJob.
"""

from __future__ import annotations

DOCKER_HUB = "docker.io"
_PULLABLE = "docker-pullable://"


def pulled_digest(image: str, image_id: str) -> str | None:
    """Name `image` by the digest that a kubelet reports as its `imageID`.

    None where that is no digest in the same repository: an image that was loaded into a node by hand has an id that no
    registry has, and the embedded cluster has no images.
    """
    repository, at, digest = image_id.removeprefix(_PULLABLE).partition("@")
    if not at or not digest.startswith("sha256:") or full_repository(repository) != full_repository(image):
        return None
    return f"{repository}@{digest}"


def full_repository(image: str) -> str:
    """Registry and path of an image, without tag and digest: `docker.io/library/python` for `python:3.11`."""
    name = image.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    path = f"{head}{slash}{tail.partition(':')[0]}"
    first = path.partition("/")[0]
    if "/" in path and ("." in first or ":" in first or first == "localhost"):
        return path
    return f"{DOCKER_HUB}/{path}" if "/" in path else f"{DOCKER_HUB}/library/{path}"
