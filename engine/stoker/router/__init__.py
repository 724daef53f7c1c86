"""The router of an InferenceDeployment: one HTTP address in front of all engines.

Owns: the choice of an engine for each request, retries until an answer begins, probes of engines, and `PUT /backends`.
It has no state beyond the snapshot: a router that restarts reads the mounted file.
Imports: `stoker.pod`, and no other package of Stoker.

Read `__main__` (the program), `app` (its routes), `proxy` (one request from end to end), `carrier` and `kept_stream`
(streams that outlive their engine); then `admission`, `lanes` and `request_class` (which request may go), `backends`
and `backend` (health and load), `policy`, `cache_aware`, `prefix_index` and `work` (the choice), `connection` (HTTP to
an engine), `snapshot` (the list that the operator writes).
"""
