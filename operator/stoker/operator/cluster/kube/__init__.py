"""A Kubernetes API server as a `Cluster`.

Owns requests, watches, credentials and the client-side rate limit; the only place that imports the Kubernetes client,
and only to read a kubeconfig. Decides nothing: every answer becomes an object or an error of `cluster.interface`.

Reading order: `kube_cluster.py` (the calls), `connection.py` (one request), `session.py` (its HTTP), `errors.py`
(status codes to errors), `ownership.py` (server-side apply), `credentials.py`, `service_account.py`, `rate_limit.py`,
`paths.py`, `pod_addresses.py`.
"""
