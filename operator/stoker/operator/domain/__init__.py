"""The operator's vocabulary: plain values and pure functions on raw objects that every layer above shares.

Owns the `Plan` that a pass returns and the `Observed` that it reads, conditions, labels, how pods are read, which nodes are lost, what follows a
failure, what an installation decides (`Settings`), time as an input. Imports nothing of the operator; of the other packages only `stoker.pod`.

Reading order: `plan`, `conditions`, `pods`, `waiting`, `recovery`, `lost_nodes`, `references`, then the small ones (`text`, `labels`, `image`,
`clock`, `backoff`, `settings`, `applied_hash`, `unsupported`).
"""
