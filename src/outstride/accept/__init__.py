"""One verifier or unmasker per file."""
