"""The load generator: requests against any OpenAI server, sent when they are due, and how long they took."""
