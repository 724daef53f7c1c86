"""Requests of the gateway to a cluster: an API server, or the embedded cluster's socket, which speaks the same API."""
