"""Answers from documents: retrieve passages, put them into the prompt in a stable order, answer, and list the citations.

Retrieval only adds text to the context. Nothing makes a model prefer it to what it learned in training.
"""
