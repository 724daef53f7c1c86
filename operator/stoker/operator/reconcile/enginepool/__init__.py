"""EnginePool: keeps as many engine pods of each revision as the spec asks for.

It alone makes, drains and deletes engine pods. Reading order:

* `reconcile` is the story of one pass;
* `view` sorts what is observed;
* `replicas` decides which pods come and go, `step` does so on bare numbers;
* `drain` takes a replica away without losing a request, `failures` spaces out replacements, `bind` chooses nodes;
* `phase` puts the result into one word and one line, `status` derives the whole status from view and outcome.

It may import `api`, `domain`, `render` and the shared modules of `reconcile`. It performs no I/O and keeps no state:
drains and failures are remembered in labels and status.
"""
