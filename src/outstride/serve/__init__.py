"""The server: an engine in a process of its own, and HTTP in front of it."""
