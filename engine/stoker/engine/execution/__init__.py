"""Execution: computes steps on one or several ranks. It owns weights, cache memory, seats, sampling and CUDA graphs.

It knows no request, no scheduler and no wire: its input and output are the plain numbers of `step`. It imports
`stoker.model`, `EnginePlan` and the plain values, never `core` or `http`.

Reading order: `step`, `executor`, `runner`, `seats`, `sampler`, `staging`; `load` starts them. A padded
pass, which is how fused kernels compute a step, is eight files, in this order:
- `pass_shape`: the fixed sizes, and which of them a step takes;
- `step_rows`: the step's chunks in the order of the pass's rows;
- `pass_inputs`: the packed buffer of numbers that the host sends;
- `staging`: its copy to the device; `seats`: what is on the device already;
- `step_kernels`: the kernels that fill the pass from both, and finish its samples;
- `dealt_draw`: the draw of its tokens, by one rank or dealt to all;
- `step_graphs`: the whole pass, as a CUDA graph where one was captured.
"""
