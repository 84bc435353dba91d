"""The child process of `subprocess_peer`: opens one engine and serves requests, one line of JSON
each.

It runs in the environment in which the engine is installed. That environment needs only the engine
and numpy; `outstride` itself is on the path.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from outstride.bench.peers.peer import Peer, PeerSetup
from outstride.errors import OutstrideError


def answers(name: str, lines: Iterable[str], out: IO[str]) -> None:
    """Opens an engine with the setup of the first line; each further line is one request."""
    peers: Sequence[Peer] = ()
    try:
        for line in lines:
            request = json.loads(line)
            try:
                if not peers:
                    place = Path(request.pop("path"))
                    module = importlib.import_module(f"outstride.bench.peers.{name}")
                    peers = module.open_all(PeerSetup(path=place, **request))
                    response: Any = [{"name": p.name, "settings": p.settings} for p in peers]
                else:
                    response = peers[request["peer"]].generate(
                        request["prompts"], request["output"]
                    )
            except OutstrideError as error:
                response = {"error": str(error)}
            except Exception as error:  # an engine's error is reported; the process stays
                response = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(response, default=str), file=out, flush=True)
    finally:
        for peer in peers:
            peer.close()


def main(name: str) -> None:
    """Redirects everything that the engine prints to standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answers(name, sys.stdin, out)


if __name__ == "__main__":
    main(sys.argv[1])
