"""The server: an engine process, a web process in front of it, and the OpenAI protocol."""
