"""The data of a run: from files to micro-batches, in an order that no layout and no restart changes.

* Owns the token cache on disk. Everything else depends on its arguments alone, so a resume needs counters only.
* numpy, no torch. May import `stoker.model.tokenizer`, `stoker.checkpoint.storage`, `stoker.pod` and
  `stoker.trainer.protocol`.
* Reading order, the way of a token: `source.py` (documents), `tokens.py` (encoder), `shard.py` (token files), `pack.py`
  (sequences), `corpus.py` (all of it), `order.py` (the n-th sample), `loader.py` (micro-batches, `batch.py`).
  `byte_bpe.py` trains a tokenizer.
"""
