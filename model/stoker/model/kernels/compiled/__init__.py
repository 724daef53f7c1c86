"""Kernels of a bfloat16 decoder on a CPU, in C, compiled for the machine at first use."""
