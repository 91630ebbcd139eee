"""Processes without files and network, with limits on CPU time and memory, for work whose cost a client chooses."""
