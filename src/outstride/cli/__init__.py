"""The command line: one file per command, and `app` which puts them together.

Nothing here is imported by the rest of the package, and nothing heavy is imported before a command
needs it: help and lists appear at once.
"""

from outstride.cli.app import main

__all__ = ["main"]
