"""The fused kernels: Triton, cuBLAS and cuDNN on CUDA devices.

`kernels.py` and `deterministic.py` are the two implementations that `kernels/kernel_set.py` chooses from; each function
stands in a file of its own name. `attention/` holds attention over packed sequences and over the cache, `sampling/`
the passes of `sampler.py`, `launch.py` how small kernels overlap.

Every kernel has its twin in `kernels/reference.py`, and a test that both agree, on the CPU through Triton's
interpreter. The files are imported only where fused kernels are chosen, because Triton may be missing.
"""
