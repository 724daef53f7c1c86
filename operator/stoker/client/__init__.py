"""The Python client of the gateway: jobs, checkpoints, deployments and the cluster, sync and async.

Owns: the requests, their retries, the waiting, and streams that go on after a cut. Its types are the gateway's own
(`stoker.gateway.models`).
May import: the gateway's models and states, httpx. It starts nothing and keeps nothing but a connection.

`client.StokerClient` and `async_client.AsyncStokerClient` have the same methods; docs/sdk.md shows them.
"""
