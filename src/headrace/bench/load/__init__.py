"""Load generator: sends requests to any OpenAI server at scheduled times, and measures their latencies."""
