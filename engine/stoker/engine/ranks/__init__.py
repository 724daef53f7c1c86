"""Several ranks under one engine: rank 0 in the engine's process, each further one in a process of its own, on this
machine or in another pod of the replica.

All ranks compute every step together. Rank 0 sends a step to the others over a socket pair, as packed numbers; tensors
travel through the ranks' process group. Every rank of a model's last layers samples by itself, from the same logits
with the same random numbers; a digest of the tokens is compared about once a second. Ranks of other layers, in a
pipeline, get rows and tokens from rank to rank (`execution.stage_links`).

It imports `execution`; the core knows only the executor.

Ranks of other pods connect to the leader by TCP and prove the replica's key; everything else is alike.

Ranks move their parts of cache blocks, to other engines and to main memory, by the leader's calls (`block_calls`), in
order with the steps; `rank_calls` keeps them until the ranks have reported their ends.

Data-parallel ranks that share experts are cores of their own, with requests of their own: `data_place` is where they
are, `data_meeting` links them, `step_rounds` and `step_links` agree on each step, `data_executor` computes it.
`pod_share` is what one of several pods has of them.

Reading order: `wire`, `block_calls`, `link`, `rendezvous`; `pod_place`, `handshake` and `pod_links` are for other pods;
`worker` is a further rank's loop; `watch` and `digests` are the rules by which ranks count as lost, `workers` owns the
processes, `executor` is what the engine submits steps to.
"""
