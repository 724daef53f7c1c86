"""Checkpoint: whether a save is complete, verified and in use, and when its data goes.

The operator never opens a checkpoint: agents report what they read back, and task pods (`task`) verify, import and
delete. Knows nothing of the other kinds' reconciles; it reads the job that wrote a save, and the resources that use it.

Reading order: `view`, `reconcile`, `task`, `metrics`, `delete`, `status`.
"""
