"""A training step for a GPU and for ranks that are not there: its launches are the kernels to compile ahead of time.

`launch` runs the trainer's own step on tensors of the CPU, in a process of its own that has entered `compiling_into`.
`cut` makes the run smaller without changing what it launches, `absent_ranks` stands in for the other ranks, `variants`
names the runs of a model without a configuration. Nothing is computed, sent or saved.

Read in this order: `cut`, `absent_ranks`, `launch`, `variants`.
"""
