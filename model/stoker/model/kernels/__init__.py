"""The model's operations, each with a reference, a deterministic and a fused implementation.

`ops.py` is the interface that the rest of the product calls: one method per operation. It checks shapes, and the
implementation is chosen once, at construction. An implementation is a module with the functions of `ops.Kernels`.

Reading order: `ops.py`, `reference.py` (what each operation computes), `deterministic.py` (the same, with bits that
do not depend on the batch), then `fused/`. Values that cross the interface: `sequences.py`, `rotation.py`,
`sampling.py`, `adam.py`. `grad_destination.py` is the seam through which the trainer names the buffer of a weight's
gradient, `weight_queue.py` the one through which a pipeline puts such gradients off.

It imports nothing else of the model. Only `fused/` imports Triton.
"""
