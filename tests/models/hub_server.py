"""A hub on this machine: the addresses that `huggingface_hub` asks, and downloads that break off."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMITS = {"main": "1" * 40, "v2": "2" * 40}


@dataclass
class Hub:
    """files: by revision and path. cut: a path whose download ends after some bytes, once."""

    files: dict[str, dict[str, bytes]]
    repo: str = "org/name"
    cut: tuple[str, int] | None = None
    broken: bool = False
    """Whether weights cannot be downloaded any more."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and range of every request."""
    address: str = ""

    def of(self, revision: str) -> dict[str, bytes] | None:
        return next((self.files.get(n) for n, c in COMMITS.items() if revision in (n, c)), None)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            api, files = f"/api/models/{hub.repo}", f"/{hub.repo}/resolve/"
            if path.startswith(f"{api}/revision/") or path == api:
                return self._info(path.removeprefix(f"{api}/revision/") if path != api else "main")
            if path.startswith(f"{api}/tree/"):
                return self._tree(path.removeprefix(f"{api}/tree/"))
            if path.startswith(files):
                revision, _, name = path.removeprefix(files).partition("/")
                return self._file(revision, name)
            return self._json(
                {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"}
            )

        def _info(self, revision: str) -> None:
            commit = COMMITS.get(revision, revision)
            if hub.of(commit) is None:
                return self._json({}, 404, {"X-Error-Code": "RevisionNotFound"})
            return self._json({"id": hub.repo, "modelId": hub.repo, "sha": commit, "siblings": []})

        def _tree(self, commit: str) -> None:
            entries = []
            for path, data in (hub.of(commit) or {}).items():
                digest = hashlib.sha256(data).hexdigest()
                entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
                entry["oid"] = digest[:40]
                if path.endswith((".safetensors", ".gguf")):
                    entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
                entries.append(entry)
            self._json(entries)

        def _file(self, revision: str, name: str) -> None:
            data = (hub.of(revision) or {}).get(name)
            if data is None:
                return self._json({}, 404, {"X-Error-Code": "EntryNotFound"})
            weights = name.endswith((".safetensors", ".gguf"))
            if self.command == "GET" and weights and hub.broken:
                return self._json({"error": "later"}, 500)
            digest = hashlib.sha256(data).hexdigest()
            start = 0
            if wanted := self.headers.get("Range"):
                start = int(wanted.removeprefix("bytes=").split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{digest if weights else digest[:40]}"')
            self.send_header("X-Repo-Commit", COMMITS.get(revision, revision))
            self.send_header("Content-Length", str(len(data) - start))
            self.send_header("Accept-Ranges", "bytes")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "HEAD":
                return None
            if hub.cut and hub.cut[0] == name:
                self.wfile.write(data[start : start + hub.cut[1]])
                hub.cut, hub.broken = None, True
                self.close_connection = True
                return None
            self.wfile.write(data[start:])
            return None

        def _json(
            self, value: Any, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(key, text)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves a hub on a free port of the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
