"""Blocks of the cache that travel: to the host tier, and to another engine. Knows no request's content and no
scheduler.

One seam for all of them: a `BlockPort` is one rank's end, a `Link` leads from it to one peer, and a `Ticket` is one
transfer under way (`port`). Links: `in_process`, `shared_memory`, `tcp`, `cuda_ipc` between GPUs; the host tier's is
`execution.host_link`. What a GPU does is behind `device_memory`, implemented by `cuda_memory` over `cuda_driver`.

A peer writes only into the receiver's landing zone (`landing_zone`), never into its cache. A slot of the zone is
granted for one request with a new generation each time. `intake` copies announced slots into the cache and compares the
checksum of what it stored (`checksum`) with what the sender announced. What is stale, foreign, late or damaged is
refused and counted.

Between engines of several ranks, or of other block sizes, `part_plan` tells which rank sends which layers, heads and
tokens where; `cells` cuts and joins blocks, `joint_link` makes one link of those between ranks, `rank_zone` is a rank's
part of the landing zone, and `block_part` tells which files are a whole block.

Read in this order: `port`, `landing_zone`, `checksum`, `intake`, `fingerprint`, `layout`, `repack`, `part_plan`,
`serial`, `wire`, `device_memory`, then the links. May import nothing of the engine but `errors`.
"""
