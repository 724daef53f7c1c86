"""The modules that agent and ranks share: configuration, channel, signals, hang detector, the sizes of the rank grid.

* Plain values and the encoding of messages. No torch, no process is started, nothing is written.
* May import `stoker.pod` and `stoker.trainer.errors`; neither `agent` nor `rank`.
* Reading order: `config.py`, `parallel_dims.py`, `messages.py`, `channel.py`, `step_signals.py`, `hang.py`.
"""
