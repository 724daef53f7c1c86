"""The core: requests, scheduling, cache bookkeeping, and the process that runs them.

It owns the queue, the block tables and the state of every request. It imports `execution` and the plain values, never
`http`. `blocks`, `scheduler`, `request`, `frames`, `stats`, `messages` and `core_client` import no torch; fronts import
the last three.

Reading order:
- `request`, `blocks`, `scheduler`: the state, the cache's blocks, the decision of a step (`schedule`);
- `awaited_blocks`: who waits for blocks that are being computed;
- `request_check`: what is refused; `deltas`: what is answered;
- `build_step`: a schedule becomes plain numbers; `engine`: schedule, submit, collect; `step_retry`: a step that failed;
- `messages`: the wire, made of `frames`; `stats`: what the core reports about itself once a second;
- `core`: the loop of the process (`main`, then `run`); `core_client`: the front's end of the wire;
- `step_pace`, `core_watch`: how long the core may be silent, and the front's watch on it;
- `build`, `kernel_warmup`, `startup`: from a configuration to an engine that can serve.
"""
