"""The arithmetic of a training job: configuration in, bytes and seconds out.

Owns: memory per rank by part, traffic per link, time of a step on a named GPU, and the layouts that fit. Imports
nothing but `stoker.pod`, and no torch, so that the trainer, the operator and the command line import it.

Read `job` (what goes in) and `model_size`, then `memory`, `traffic`, `step_time`, and `estimate`, which puts them
together. `layouts` searches, `measured` compares a plan with the first steps of a run.
"""
