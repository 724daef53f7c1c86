"""The base of all bodies and the types of their fields.

Values; used by `protocol` and `output_format`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from stoker.engine.sampling import COUNT_LIMIT


def integral(value: object) -> object:
    """Turn a float without a fraction into an integer, because some clients send `16.0`; pass on anything else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(integral)]
Count = Annotated[Int, Field(lt=COUNT_LIMIT)]
"""A number of tokens. Python refuses to write the sum of two with thousands of digits."""
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
"""Lists end at their first wrong item: pydantic keeps a kilobyte for each error, and a body may have millions."""
Texts = Annotated[list[str], Field(fail_fast=True)]


class Body(BaseModel):
    """Base of all bodies. Unknown keys have no effect. Values must have their field's own type: a text is no number."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if value is not None}
