"""The report of a run as a live page on loopback, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from inchworm.analysis.report import report_body, report_page
from inchworm.analysis.runs import read_run
from inchworm.core.errors import InchwormError
from inchworm.tracking.jsonl import METRICS

HOST = "127.0.0.1"


class LivePage:
    """The content of the page, made again only when a file of a run has changed."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs = runs
        self._made_from: object = None
        self._body = ""
        self._lock = threading.Lock()

    def whole(self) -> str:
        """The page with its style and script."""
        return report_page([read_run(path, rows=False) for path in self.runs], live=True)

    def body(self) -> str:
        """What the page's script fetches."""
        with self._lock:
            records = [read_run(path, rows=False) for path in self.runs]
            found = [(record.state, *(_stamp(record.path / name) for name in (METRICS, "ratings.json"))) for record in records]
            if found != self._made_from:
                self._body, self._made_from = report_body(records), found
            return self._body


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def make_server(runs: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on loopback; port 0 takes a free one, `server_address` has it. Nothing but the page is served."""
    page = LivePage(runs)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "inchworm", ""

        def do_GET(self) -> None:
            """Answer the two addresses of the page."""
            answers = {"/": page.whole, "/page": page.body}
            own = {f"{name}:{self.connection.getsockname()[1]}" for name in (HOST, "localhost")}
            if self.headers.get("Host") not in own:  # a foreign name that resolves to loopback is another site's page
                self._send(403, "this page is served to 127.0.0.1 only")
                return
            answer = answers.get(self.path)
            try:
                self._send(200 if answer else 404, answer() if answer else "there is no such page")
            except (InchwormError, OSError) as error:  # the run is being deleted
                self._send(503, f"the run cannot be read: {error}")

        def _send(self, code: int, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"text/{'html' if code == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing about requests."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    return server
