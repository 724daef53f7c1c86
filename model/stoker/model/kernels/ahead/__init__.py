"""Kernels compiled ahead of time: on a machine that needs no GPU, for processes that start later on one that has some.

`build` runs a program's own launches against `absent_gpu`, a driver that compiles and does not launch; so the set of
kernels comes from the code that launches them, never from a list. The folder that it fills has a `manifest`, which
names the Triton version and the architectures. `layered_cache` makes a process look there first, then in the user's own
cache. Triton's keys hold source, version, architecture and options; a kernel that is not there is compiled as ever.

Read in this order: `manifest`, `layered_cache`, `build`, `absent_gpu`, `products`, `driver_library`. Only `manifest`
can be imported without Triton.
"""
