"""Decoders, loaders and tokenizers."""
