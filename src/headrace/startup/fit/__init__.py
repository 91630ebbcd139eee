"""Planner: memory, speed and layouts of a model from its headers alone (`headrace fit`)."""
