"""InferenceDeployment: decides which checkpoint is served in which revision, and keeps routers and their backends.

Reading order:

* `reconcile` is the story of one pass;
* `view` sorts what is observed;
* `model_choice` resolves `spec.model`, `rollout` moves the EnginePools from one revision to the next;
* `routers` keeps the router pods, `backends` is the snapshot of engines that they follow;
* `autoscaling` names what has no effect beside an external scaler;
* `phase` puts the result into one word and one line, `status` derives the whole status from view and outcome.

It may import `api`, `domain`, `render`, `reconcile/enginepool` and the shared modules of `reconcile`. It makes
EnginePools but no engine pod: those belong to the EnginePool's reconcile. It performs no I/O and keeps no state.
"""
