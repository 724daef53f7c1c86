"""The operator as a program: one replica on Kubernetes, and the embedded cluster's supervisor (`local/`).

Owns processes, signals, configuration, leader election, the control keys and Kopf's shell. Puts loop, reconcilers and a
cluster together; nothing imports it but the command line and `python -m stoker.operator`.

Reading order: `program.py` (one replica), `config.py`, `lease.py` and `lease_object.py` (leader election),
`key_ring.py`, `shell.py` (wake-ups from Kopf), `reconcilers.py` (which function reconciles which kind), then `local/`.
"""
