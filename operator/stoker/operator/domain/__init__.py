"""The operator's vocabulary: plain values and pure functions on raw objects that every layer above shares.

Owns the `Plan` that a pass returns and the `Observed` that it reads, conditions, labels, the reading of pods, the
classification of lost nodes, the actions after a failure, the settings of an installation, time as an input. Imports
nothing else of the operator, and of the other packages only `stoker.pod`.

Reading order: `plan`, `conditions`, `pods`, `waiting`, `recovery`, `lost_nodes`, `references`, then the small ones
(`text`, `labels`, `image`, `clock`, `backoff`, `settings`, `applied_hash`, `unsupported`).
"""
