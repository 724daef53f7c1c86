"""Attention kernels: packed sequences for training and prefill, the cache for decode.

`packed.py` and `paged.py` are what `kernels.py` calls; they choose between `flash.py`, `cudnn.py` and our own kernels
in `forward.py`, `backward.py` and `decode.py`. `tile.py` holds the parts that those share, `splits.py` the cutting of
long sequences into parts.
"""
