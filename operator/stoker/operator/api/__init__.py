"""Types of the custom resources, and what is generated from them: CRDs, API reference, list of what is not built.

Owns: fields, defaults, rules (CEL) and descriptions of the four kinds. Descriptions are what `kubectl explain` shows.
May import: pydantic and `stoker.pod`. It never imports cluster, rendering or reconcilers.

Read in this order: `value` (scalars and CEL helpers), `metadata`, `pod_fields`, `trainingjob` with `training_rules`
and `trainingjob_status`, `checkpoint`, `inferencedeployment` with `pool`, `engine_settings` and `rollout`,
`enginepool`; then `schema` (pydantic to structural schema), `lint`, `crd`, `reference`, `not_yet`.

After a change: `make crds`.
"""
