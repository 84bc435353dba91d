"""Parsing answers: reasoning, content and tool calls, as the text arrives."""
