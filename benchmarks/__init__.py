"""Benchmarks that are run from a clone: other engines, our own kernels, simulations and data sets. No part of the package.

Each is a command: `python -m benchmarks.NAME --help`, with the Python of the project's environment.
"""
