"""The variables of clients: those of the process, and over them the files of a mounted Secret.

`STOKER_MODEL_ACCESS` names the folder of the Secret; each file in it counts as a variable: `HF_TOKEN`, `HF_ENDPOINT`,
`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_ENDPOINT_URL`, `AWS_REGION`,
`REGISTRY_USERNAME`, `REGISTRY_PASSWORD`, `.dockerconfigjson`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "STOKER_MODEL_ACCESS"


def access_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the process's variables with those of the Secret over them."""
    folder = environment.get(VARIABLE)
    if not folder:
        return dict(environment)
    files = [path for path in Path(folder).iterdir() if path.is_file() and not path.name.startswith("..")]
    return {**environment, **{path.name: path.read_text().strip() for path in files}}
