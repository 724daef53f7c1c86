"""An OpenAI client of a deployment, where the package `openai` is installed."""

from __future__ import annotations

from typing import Any, Literal

from stoker.gateway.models import Deployment


def endpoint_of(deployment: Deployment) -> str:
    """The base URL of a deployment for OpenAI's clients, which add the paths behind `/v1`. Raises ValueError."""
    if not deployment.endpoint:
        raise ValueError(f"deployment {deployment.deployment_name} is {deployment.phase} and has no endpoint yet")
    return f"{deployment.endpoint.rstrip('/')}/v1"


def openai_client(kind: Literal["OpenAI", "AsyncOpenAI"], base_url: str, api_key: str) -> Any:
    """Make a client. Raises ImportError with the remedy."""
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ImportError("this needs the package openai: pip install openai") from error
    return getattr(openai, kind)(base_url=base_url, api_key=api_key)
