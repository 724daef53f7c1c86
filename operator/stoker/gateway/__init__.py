"""The gateway: training and cluster over REST, as custom resources of a cluster.

Owns: routes, their documents (OpenAPI), the caller's identity, the shape of errors. It keeps no state: what an answer
holds is read from the cluster, with the rights of the caller.
May import: `stoker.pod`. It knows the cluster by HTTP alone, not the operator.

Layers: `program` over `http` (routes) over `cluster` (requests to the API server) over `domain` (pure translations).
"""
