"""Several HTTP fronts over one engine: processes that share a port, and what makes them one server.

Owns: the processes of fronts and their restarts, the port and who gets its next connection, the messages between the
processes and their parent, the sums that `/status`, `/metrics` and `GET /load` show.
Imports: `http` and `core`'s client, never torch. Requests travel from each front straight to the core, not through
here.

Read `pool` (the parent's side), `front_process` (one of them), `acceptor` (connections), `link` (messages), `report`
(sums), then `front_program` (the process itself).
"""
