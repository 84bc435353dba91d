"""A program for a terminal of its own: `outstride chat` (or run) on a slow toy model."""

from __future__ import annotations

import sys

from outstride.cli import main
from tests.bench.fake import context

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], context=context(pause=0.02)))
