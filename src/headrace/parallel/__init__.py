"""Models that run on more than one process or host."""
