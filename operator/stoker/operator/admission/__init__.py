"""Admission without an API server: defaults, structure and CEL rules of the generated CRDs, with the server's messages.

Owns: what the embedded cluster and the command line refuse, and how the refusal reads.
May import: `cluster.interface`, for the error that every cluster raises. It imports no reconciler and keeps no state.

Read in this order: `admission` (the steps), `unknown`, `defaults`, `structure`, `cel_rules`, `status_cause`.
"""
