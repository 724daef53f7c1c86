"""The model that trainer and engine share: configuration, decoder, kernels, weights, tokenizer and chat templates.

It owns the one definition of a forward pass and everything that turns files into one. It may import
`stoker.checkpoint` and `stoker.pod`, and neither program. Configuration, tokenizer, chat templates and
`weights/gguf_tokenizer.py` need no torch.

Reading order:

* `config.py` (read by `config_json.py`), `block.py`, `decoder.py`: the architecture. `attend.py` is its only view of
  attention.
* `parallel.py`, `parameter.py`: layers that are cut over tensor-parallel ranks, and the table of which rows hold
  what.
* `kernels/`: the operations. `paged_attend.py` with `paged_batch.py`, `paged_plan.py` and `paged_buffers.py`: the
  engine's attention over a cache.
* `weights/`: files into a decoder and back.
* `tokenizer.py`, `tokenizer_limits.py`; `chat_template.py` with `render_process.py` (the parent's end),
  `render_child.py` (the child's program) and `render_frames.py` (what both agree on).
"""
