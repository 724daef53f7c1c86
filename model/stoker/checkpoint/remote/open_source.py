"""The source that a URI names."""

from __future__ import annotations

from stoker.checkpoint.remote.bucket_model import BucketModel
from stoker.checkpoint.remote.hub_model import HubModel
from stoker.checkpoint.remote.listing import Environment, RemoteSource
from stoker.checkpoint.remote.model_uri import ModelUri
from stoker.checkpoint.remote.registry_model import RegistryModel


def open_source(uri: ModelUri, environment: Environment) -> RemoteSource:
    """Make the client of a source; nothing is sent.

    Raises:
        CheckpointError: its package is missing, or its login is not valid.
        PermissionError: the credentials of a bucket cannot be read.
    """
    if uri.scheme == "hf":
        return HubModel(uri, environment)
    return BucketModel(uri, environment) if uri.scheme == "s3" else RegistryModel(uri, environment)
