"""Where checkpoints lie."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import LocalRef
from stoker.operator.api.value import Name, RelativePath, Value, Word, exactly_one, rule, rules


class ObjectStore(Value):
    """A bucket that speaks S3. Not supported yet."""

    bucket: Word
    prefix: RelativePath | None = None
    endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s]+$")] | None = None
    region: Word | None = None
    credentials_secret_ref: LocalRef | None = None


class Storage(Value):
    """A folder of a PersistentVolumeClaim, or a bucket."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            exactly_one("claimName", "s3"),
            rule(
                "!has(self.path) || has(self.claimName)",
                "path is a folder of the claim: it needs claimName (a bucket has s3.prefix)",
                field=".path",
            ),
        )
    )

    claim_name: Name | None = None
    """PersistentVolumeClaim of the same namespace; ReadWriteMany where pods run on several nodes."""
    path: RelativePath | None = None
    """Folder inside the claim. Default for a job: its name."""
    s3: ObjectStore | None = None
