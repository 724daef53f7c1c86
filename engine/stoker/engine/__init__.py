"""The inference engine: one replica of a served model, as a program (`program`, `serve`) or as a library (`llm`).

Layers, each importing only those below it (import-linter): programs -> `http` -> `core` -> `execution` -> plain values
(`plan`, `config`, `sampling`, `errors`). It imports `stoker.model`, `stoker.checkpoint` and `stoker.pod`, never the
router, the trainer or the operator.

A replica is two processes: the front (`http`, no torch) and the core (`core` and `execution`), with `core.messages` as
the wire. `plan` turns the configuration into an `EnginePlan`, every choice that the ranks need.

Reading order: `llm` (the shortest use), `core.engine`, then `core` and `execution` by their own orders, `http`,
`program`. docs/life-of-a-request.md follows one request through all of it.
"""
