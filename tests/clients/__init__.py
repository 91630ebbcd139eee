"""Clients of the OpenAI protocol, each in an environment of its own, against `headrace serve`. See test_clients.py."""
