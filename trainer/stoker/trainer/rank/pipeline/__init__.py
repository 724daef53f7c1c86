"""Pipeline parallelism of one rank: its stages, the messages to its neighbours, and the executor of a schedule.

Owns: activations in flight, receive buffers, and the links to the neighbours. The order of work comes from
`stoker.pod.pipeline` as data; parameters and gradients belong to `stoker.trainer.rank.zero`.

Read `executor` (runs any list of actions), then `stage` (passes of one slice of the model), `link` (messages),
`passes` (the training step's view), `slices` (which layers a rank holds) and `tied_table` (one table at both ends).
"""
