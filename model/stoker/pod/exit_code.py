"""The former home of `stoker.pod.causes`, until every importer has moved there."""

from __future__ import annotations

from stoker.pod.causes import EXIT_CODES as EXIT_CODES
from stoker.pod.causes import Cause as Cause
