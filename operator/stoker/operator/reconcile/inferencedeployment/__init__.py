"""InferenceDeployment: decides which checkpoint is served in which revision, and keeps the routers and their list of backends.

Reading order: `reconcile` is the story of one pass. `view` sorts what is observed. `model_choice` resolves `spec.model`, `rollout`
moves the EnginePools from one revision to the next, `routers` keeps the router pods, `backends` is the snapshot that they follow.
`phase` puts the result into one word and one line, `status` derives the whole status from view and outcome.

It may import `api`, `domain`, `render`, `reconcile/enginepool` and the shared parts of `reconcile`. It makes EnginePools but no
engine pod: those belong to the EnginePool's reconcile. It performs no I/O and keeps no state.
"""
