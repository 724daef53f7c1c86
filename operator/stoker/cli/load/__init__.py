"""`stoker bench serve`: requests to any server that speaks OpenAI's API, each sent when it is due.

Reading order: `workload` (what is asked, and when), `exchange` (one request and its answer on the wire), `sending` (all
of them), `figures` (what came of it), `report` (as text), `options` and `main` (the program). No torch, no server.
"""
