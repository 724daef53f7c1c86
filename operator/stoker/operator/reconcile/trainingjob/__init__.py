"""TrainingJob: which attempt runs, what it resumes, when it is over.

One attempt is one gang of pods. `status.attempt` is written before its pods are made, its end before they are removed.
A pod that is missing is made only while the gang was never seen whole; afterwards it is lost.

Reading order: `view`, `reconcile` (the order of decisions), then the decisions in that order: `stop`, `recover`,
`start` (with `resume` and `pinning`), `follow`, `end`. `saves` and `orphaned_saves` make Checkpoint objects, `attempt`
holds facts, `status` derives the status.
"""
