"""The gateway's configuration: where it listens, which cluster it serves, how callers prove who they are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stoker.pod.config_file import Config
from stoker.pod.listen import ListenConfig

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class ApiServerConfig(Config):
    """A Kubernetes API server. Callers are known by their bearer token (TokenReview) and act with their own rights."""

    kind: Literal["kubernetes"] = "kubernetes"
    url: str | None = None
    """Default: the API server of the cluster that this pod runs in."""
    ca_file: str | None = f"{SERVICE_ACCOUNT}/ca.crt"
    token_file: str | None = f"{SERVICE_ACCOUNT}/token"
    """Read again for each request: the kubelet renews it."""
    audiences: tuple[str, ...] = ()
    """Audiences that a caller's token must have one of; none: the API server's own."""
    passed_extras: tuple[str, ...] = ()
    """Extra attributes of callers that are passed on. The service account needs the right to impersonate them."""
    identity_cache_s: float = Field(default=10.0, ge=0, le=300)
    """Time for which a reviewed token is not reviewed again."""


class EmbeddedConfig(Config):
    """The embedded cluster of this machine. Callers hold the key of a file that only its user can read."""

    kind: Literal["embedded"] = "embedded"
    socket: str
    """Unix socket of the supervisor."""
    key_file: str
    """File with the key, mode 0600."""


class GatewayConfig(Config):
    """Everything of one gateway."""

    listen: ListenConfig = ListenConfig()
    cluster: Annotated[ApiServerConfig | EmbeddedConfig, Field(discriminator="kind")] = ApiServerConfig()
    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    """Namespace of requests that name none."""
    prometheus_url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Prometheus with DCGM's metrics, for the use of GPUs."""
    metrics_task_wait_s: float = Field(default=20.0, ge=0, le=60)
    """Longest wait for the task that reads the metrics log of a job whose pods have ended."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _needs_tls_for_tokens(self) -> GatewayConfig:
        url = self.cluster.url if isinstance(self.cluster, ApiServerConfig) else None
        if url is not None and not url.startswith("https://") and not _is_loopback(url):
            raise ValueError(f"cluster.url: https:// is needed beyond this machine, got {url!r}")
        return self


def _is_loopback(url: str) -> bool:
    return url.startswith(("http://127.", "http://localhost", "http://[::1]"))
