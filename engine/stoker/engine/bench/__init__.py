"""`stoker bench throughput | latency`: an engine in this process, measured without HTTP.

Reading order: `workload` (the prompts), `figures` (what the times mean), `fit` (workloads that the engine cannot take),
`progress` (for people), `measure` (the runs), `report` (figures as text), `options` and `program` (the command).

`workload`, `figures`, `fit`, `report` and `options` are pure. Only `measure` imports torch, once the options are
checked.
"""
