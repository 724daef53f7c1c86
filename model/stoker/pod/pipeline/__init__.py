"""Pipeline parallelism as plain data: the order of work of every rank, its simulation, and the cut of layers.

Owns: actions, the schedules (GPipe, 1F1B, interleaved 1F1B, zero-bubble), their time and memory, and which layers a
stage holds. Imports nothing of Stoker and no torch: the trainer executes the actions, `stoker.pod.plan` reads bubble
and memory, admission refuses what does not fit.

Read `actions`, then `schedules` (who makes the order), `messages` (sends and receives), `simulation` (the check of an
order), and `stage_cut`.
"""
