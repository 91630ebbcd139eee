"""Answers out of documents: find passages, put them into the prompt in a stable order, ask, and say what was cited.

Retrieval only puts text into the context: nothing makes a model give it more weight than what it was trained on.
"""
