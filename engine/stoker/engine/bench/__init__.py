"""`stoker bench throughput | latency`: an engine in this process, measured without HTTP.

Reading order: `workload` (the prompts), `figures` (what the times mean), `measure` (the runs), `program` (the command).
"""
