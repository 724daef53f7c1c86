"""The trainer: `python -m stoker.trainer --config FILE` runs one pod of a training run.

Two programs that share a protocol. The agent (`agent/`, no torch) is the pod's main process: it starts the ranks,
serves their status, detects hangs and writes the termination message. A rank (`rank/`, torch) trains.

* Layers: `agent` and `rank` do not import each other; both import `protocol`, and all import `errors`. import-linter
  checks it.
* May import `stoker.checkpoint`, `stoker.model` (ranks only) and `stoker.pod`; never engine, operator, router or
  command line.
* Reading order: `protocol/channel.py`, `agent/agent.py`, `rank/main.py`, `rank/loop.py`;
  docs/life-of-a-training-step.md leads through the rest.
"""
