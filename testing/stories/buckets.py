"""A bucket for stories: a server in the test's process, and the Secret of its credentials."""

from __future__ import annotations

from typing import Any

from testing.checkpoint.s3_server import KEY, SECRET, S3Server

SECRET_NAME = "bucket-key"


def secret() -> dict[str, Any]:
    """Return the Secret with the server's credentials."""
    data = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET_NAME}, "stringData": data}


def storage(server: S3Server, bucket: str, prefix: str | None = None) -> dict[str, Any]:
    """Return the storage of a manifest."""
    s3 = {"bucket": bucket, "endpoint": server.endpoint, "credentialsSecretRef": {"name": SECRET_NAME}}
    return {"s3": s3 if prefix is None else {**s3, "prefix": prefix}}
