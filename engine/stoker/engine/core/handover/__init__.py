"""Prefill at one engine, decode at another: how a request's prompt is computed at a helper and taken over here.

The decode engine D owns the request and its stream. It names itself to the prefill engine P (`messages.PeerHello`),
sends the tokens with slots of its landing zone (`Prefill`), and gets verified blocks and the first output tokens back.
Once all blocks are in its own cache, it goes on alone. Whatever goes wrong at P, D computes the rest itself: the tokens
are the same, because they depend on (seed, choice, position) only.

`decode_side` and `prefill_side` hold the states, `peers` the engines that are called. `decode_desk` and `prefill_desk`
act on an engine; `cache_room`, `stale_blocks` and `takeover_watch` are parts of the former. `desk` is both for one
core, `peer_post` carries messages between cores. `open_desk` makes them: `block_memory` and `host_ports` for one rank,
`rank_group` over the `rank_blocks` of several.
"""
