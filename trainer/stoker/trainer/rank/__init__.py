"""One rank: a process that trains its share of a run, from a configuration to checkpoints.

* Owns the optimizer state (`zero.py`, `bucket_state.py`), the loop, saves, and the communication with the other ranks.
  The model's layers and kernels are `stoker.model`'s, the checkpoint format is `stoker.checkpoint`'s.
* May import those, `stoker.pod` and `stoker.trainer.protocol`; never `stoker.trainer.agent`, to which it talks over the
  channel alone.
* Start: `main.py` -> `run_inputs.py`, `build.py` (`zero_maker.py`, `run_facts.py`) -> `loop.py`. A step:
  `train_step.py`, `zero.py`, `bucket.py`, `gradient_wire.py` or `gradient_sum.py`, `communicator.py`, `clip.py`,
  `optimizer.py`. A save: `snapshot.py`, `piece_map.py`, `saver.py`, `save_group.py`.
* World size 1 is no special case: the communicator of one rank does nothing.
"""
