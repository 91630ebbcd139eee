"""Containers: the file formats that a compressed model is written in."""
