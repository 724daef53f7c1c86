"""The `stoker` command.

Owns the verbs, their options and what they print. A verb either talks to the supervisor of the embedded cluster over
its Unix socket (`stoker local`), or replaces this process by the program that does the work (`python -m
stoker.<package>`).

May import the operator's data (`cluster.kinds`, `cluster.local.folders`), and `service.local` inside a function.
Imports no engine, trainer, model, checkpoint or router, and no torch: each verb pays only for what it needs, and
`stoker --help` for nothing.

Reading order: `main.py` (table of verbs), `programs.py` (verbs that are programs), `local.py` and
`supervisor_client.py` (`stoker local`), `progress.py` and `printers.py` (what people see), `manifests.py` and
`manifest_yaml.py`, `train.py`, `chat.py`.
"""
