"""What every program in a pod shares: strict configuration, exit codes, termination message, control tokens, probes.

It is the contract between the programs and whatever starts them, the operator or a person. It may import nothing else
of ours and no torch, so each program and each task can use it.

Reading order: `config_file.py` (a JSON file into frozen dataclasses; unknown keys fail with their path),
`exit_code.py` and `termination_message.py` (how a program ends and why), `listen.py`, `serve.py` and `http.py` (the
server of probes, status and metrics), `control_key.py` (the signed tokens of control routes).
"""
