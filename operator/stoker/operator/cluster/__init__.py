"""The cluster as the operator sees it, and its two implementations.

`interface.py` is the contract: raw objects in, raw objects out, one tree of errors. `kube/` fulfils it on a Kubernetes
API server, `local/` on this machine; both pass one suite (`testing/operator/cluster_contract.py`). All input and output
of the operator is here.

May import `domain` and `stoker.pod`; knows neither the loop nor a reconciler nor the service around them.

Reading order: `interface.py`, `kinds.py`, `fenced.py`, `pod_http.py`, then one of the two implementations.
"""
