"""The passes of sampling, for `sampler.py`: adjustments, the scan of the logits, limits, the draw.

Reading order: `seat.py` (a row's numbers), `adjustment.py`, `scan.py`, then the limits: `limits.py` calls
`bracket.py`, `search.py` and `selection.py`; last `draw.py`. No pass waits for the device or depends on how many rows
there are.
"""
