"""The agent: the main process of a pod, parent of its ranks.

* Owns the ranks' processes, the HTTP server (probes, status, metrics, control calls), the deadlines, and the
  termination message.
* Imports no torch and computes nothing, so it answers while every rank is busy. May import `stoker.pod` and
  `stoker.trainer.protocol`, never `stoker.trainer.rank`: it starts ranks by a command line.
* Decisions are pure: `outcome.py` finds the root cause, `run_state.py` folds events into status, `pod_rank.py` plans
  environments. Processes and sockets are in `rank_process.py`, `server.py` and `peers.py`.
* Reading order: `program.py`, `agent.py`, then the files in the order in which `agent.py` uses them.
"""
