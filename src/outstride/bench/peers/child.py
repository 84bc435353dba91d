"""The other end of `distant`: opens one engine and does what it is told, a line of JSON at a time.

It runs in whatever environment the engine is installed in. All that is asked of that environment is
the engine and numpy: `outstride` itself comes along on the path.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from outstride.bench.peers.peer import Ground, Peer
from outstride.errors import OutstrideError


def answers(name: str, lines: Iterable[str], out: IO[str]) -> None:
    """Opens an engine on the ground that the first line describes; each further line is a turn."""
    peers: Sequence[Peer] = ()
    try:
        for line in lines:
            told = json.loads(line)
            try:
                if not peers:
                    place = Path(told.pop("path"))
                    module = importlib.import_module(f"outstride.bench.peers.{name}")
                    peers = module.open_all(Ground(path=place, **told))
                    said: Any = [{"name": p.name, "settings": p.settings} for p in peers]
                else:
                    said = peers[told["peer"]].generate(told["prompts"], told["output"])
            except OutstrideError as error:
                said = {"error": str(error)}
            except Exception as error:  # whatever an engine raises is news, not a reason to die
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(said, default=str), file=out, flush=True)
    finally:
        for peer in peers:
            peer.close()


def main(name: str) -> None:
    """Engines print as they like: what they say goes to where errors go."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answers(name, sys.stdin, out)


if __name__ == "__main__":
    main(sys.argv[1])
