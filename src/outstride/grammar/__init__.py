"""Answers of a given shape: JSON schemas, regular expressions and grammars as masks over tokens."""
