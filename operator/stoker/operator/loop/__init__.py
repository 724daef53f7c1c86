"""The machinery around the reconcilers: informers fill a store, changes queue keys, workers run passes.

A pass observes, reconciles and executes. The package owns everything that is asynchronous, and what is remembered
between passes: objects, reports, refusals, silent nodes, delays. It decides nothing about a kind: reconcilers come
from outside (`service/reconcilers.py`). Imports `cluster` (the interface only), `render` and `domain`; never
`reconcile`.

Reading order: `operator` (the whole loop; `work` is one pass), `observe` and `lost_pods` (what a pass sees),
`execute` (how a plan is carried out), `store` with `object_pruning` and `interning` (what stays in memory),
`informer`, `work_queue`, `poller`, `node_watch`, `public_keys`, `metrics`.
"""
