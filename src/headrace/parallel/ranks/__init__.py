"""Tensor parallelism on one host: each rank is a process with a share of every layer."""
