"""A Kubernetes API server as a `Cluster`.

Owns requests, watches, credentials and the client-side rate limit; the only place that imports the Kubernetes client.
Decides nothing: every answer becomes an object or an error of `cluster.interface`.

Reading order: `kube_cluster.py` (the calls), `connection.py` (one request), `errors.py` (status codes to errors),
`ownership.py` (server-side apply), `credentials.py`, `rate_limit.py`, `paths.py`.
"""
