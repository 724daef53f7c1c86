"""The control plane: resource types, pure reconcilers, and the program that runs them on Kubernetes or on one machine.

Owns: the four kinds and their admission, every decision about pods, checkpoints and routers, and the embedded cluster.
Imports: `stoker.pod` and no data plane; programs get their configuration as JSON.

Layers, from the bottom: `api` (types and CRDs) and `domain` (plain values), `render` (children of a resource),
`admission`, `cluster` (the only I/O), `loop` (informers, queue, execution) beside `reconcile/<kind>` (decisions), and
`service` (the program; `service/local` is the embedded cluster).

Read `domain/plan.py`, `loop/operator.py`, `reconcile/outcome.py`, then `reconcile/trainingjob/reconcile.py`.
"""
