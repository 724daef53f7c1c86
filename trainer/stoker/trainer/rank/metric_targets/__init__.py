"""Targets of a run's metrics beside its JSONL log: TensorBoard files, Weights & Biases, MLflow.

Each owns one connection or folder, is made before the first step on the rank that leads, and imports its package when
it is made. Read `target`, then any other.
"""
