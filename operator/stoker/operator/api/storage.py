"""The storage of checkpoints: a folder of a claim, or a bucket."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import LocalRef
from stoker.operator.api.value import ForeignName, Name, RelativePath, Value, exactly_one, rule, rules


class ObjectStore(Value):
    """Bucket with the S3 protocol."""

    bucket: ForeignName
    prefix: RelativePath | None = None
    endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s]+$")] | None = None
    region: ForeignName | None = None
    credentials_secret_ref: LocalRef | None = None


class StorageSpec(Value):
    """Folder of a PersistentVolumeClaim, or bucket."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            exactly_one("claimName", "s3"),
            rule(
                "!has(self.path) || has(self.claimName)",
                "path needs claimName: a bucket has s3.prefix",
                field=".path",
            ),
        )
    )

    claim_name: Name | None = None
    """PersistentVolumeClaim of the namespace; ReadWriteMany for pods on several nodes."""
    path: RelativePath | None = None
    """Folder inside the claim; default: the job's name."""
    s3: ObjectStore | None = None
