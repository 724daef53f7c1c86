"""Settings of all property tests: other processes share the machine, so no example has a deadline."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
