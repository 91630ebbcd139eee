"""Holders of weights, of which models consist. They compute nothing."""
