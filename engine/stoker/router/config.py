"""The router's configuration, rendered by the operator from an InferenceDeployment.

Frozen; read once by `__main__`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from stoker.pod.class_place import MAX_CLASSES
from stoker.pod.config_file import Config
from stoker.pod.listen import ListenConfig
from stoker.router.request_class import RequestClass, late_problem


class RouterConfig(Config):
    """Everything that one router replica needs."""

    namespace: str = "default"
    deployment: str
    listen: ListenConfig = ListenConfig()
    termination_log: str | None = None
    backends_file: str
    """File with the first snapshot, from a mounted ConfigMap. `PUT /backends` replaces it by newer ones."""
    policy: Literal["leastPending", "roundRobin", "powerOfTwo", "random", "cacheAware", "locality"] = "leastPending"
    connect_timeout_s: float = Field(default=2.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of a backend within one answer."""
    probe_interval_s: float = Field(default=1.0, gt=0)
    max_attempts: int = Field(default=3, ge=1)
    """Backends tried for a request that has not started to answer."""
    hold_s: float = Field(default=0.0, ge=0)
    """How long a request waits for a backend to become ready before it is refused with 503."""
    max_held_requests: int = Field(default=256, ge=0)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1)
    max_resume_bytes: int = Field(default=64 * 2**20, ge=0)
    """Bytes of running streams that are kept, so that other engines can go on with them; 0: none is."""
    resume_wait_s: float = Field(default=10.0, ge=0)
    """How long a stream whose engine is gone waits for another one."""
    classes: tuple[RequestClass, ...] = Field(default=(), max_length=MAX_CLASSES)
    """In their order; the first is that of requests that name none. Empty: every request goes at once."""
    grace_period_s: float = Field(default=30, gt=0)

    @field_validator("classes")
    @classmethod
    def _unlike_names(cls, classes: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
        names = [name for one in classes for name in (one.name, *one.service_tiers)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"listed twice: {', '.join(twice)}")
        if (problem := late_problem(classes)) is not None:
            raise ValueError(problem)
        return classes
