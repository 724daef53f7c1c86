"""Placement of gangs of pods on nodes: a pure function of requests, free capacity and topology labels.

Owns the values that it takes (`Gang`, `NodeCapacity`, `Level`) and gives (`Placement`, `Unplaceable`). Used for the
ranks of a TrainingJob, for serving replicas of several pods, and for prefill and decode pools alike. Imports nothing
else of the operator.

Reading order: `gang`, `node_capacity`, `node_affinity`, `quantity`, `place`, `unplaceable`; then devices of claims:
`device`, `device_claim`, `device_selector`, `device_members`, and `device_catalog`, which turns them into amounts like
those of CPUs.
"""
