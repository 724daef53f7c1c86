"""The machinery around the reconcilers: informers fill a store, changes put keys on a queue, workers observe, reconcile and execute.

Owns everything that is asynchronous and remembered between passes: objects, reports, refusals, silent nodes, delays. It decides nothing about a
kind: reconcilers are handed in (`service/reconcilers.py`). Imports `cluster` (the interface only), `render.keys` and `domain`; never `reconcile`.

Reading order: `operator` (the whole loop; `work` is one pass), `observe` and `lost_pods` (what a pass sees), `execute` (how a plan is carried
out), `store` with `object_pruning` and `interning` (what is kept in memory), `informer`, `work_queue`, `poller`, `node_watch`, `public_keys`,
`metrics`.
"""
