"""The contract between a pod and the operator, and the HTTP server that every program embeds.

Owns: configuration files, exit codes, causes and termination messages, control tokens, `/livez`, `/readyz`, `/status`,
`/metrics` and the guarded control routes, the limits of every HTTP port, and how the log of a pod is followed.
Imports: no other package of Stoker and no torch. Every other package may import it.

`pipeline` is its own small package: schedules of pipeline stages. `resources` is another: what pods take and what
nodes offer.

Read `config_file`, `listen`, `http_limits`; then `serve` (a server), `http_protocol` (one connection with its limits),
`asgi` and `body_budget` (reading a request); then `http` (routes) and `control_key` (their guard); then `exit_code` and
`termination_message` (the end of a program); then `followed_logs`, `log_reading`, `log_position` (logs through cuts).
"""
