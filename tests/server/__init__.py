"""The server, as clients and strangers meet it."""
