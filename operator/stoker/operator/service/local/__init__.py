"""The supervisor: the one process of a state folder, with object store, operator, kubelet and Services inside.

Owns the start and the end of the embedded cluster, its Unix socket and its API. The folder's lock is the proof that a
supervisor runs; what the API acknowledges was written. `single_run.py` prepares one TrainingJob without any of this,
for `stoker train`.

Reading order: `main.py` (the program), `supervisor.py`, `control_socket.py` and `api.py`, `kubelet.py`,
`services.py`, `single_run.py`.
"""
