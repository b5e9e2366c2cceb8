"""Serves the page on the loopback interface while runs go on. It serves no file and accepts no data."""

import gzip
import hashlib
import hmac
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from realhf.apps.view.report.page import render
from realhf.apps.view.report.page_data import page_content
from realhf.apps.view.report.run_set import RunSet
from realhf.base.errors import UserError
from realhf.base.version import __version__

HOST = "127.0.0.1"
MIN_INTERVAL_S = 1.0  # between two reads of the run directories
REQUEST_TIMEOUT_S = 30.0
MAX_THREADS = 32  # connections that are served at a time
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LivePage:
    """The page of runs, rendered again when their files have changed."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._content, self._tag, self._read_at = b"", "", float("-inf")

    def current(self) -> tuple[bytes, str]:
        """Return the compressed page and its entity tag. Requests at the same time share one update."""
        with self._lock:
            if time.monotonic() - self._read_at >= MIN_INTERVAL_S:
                if self._runs.update() or not self._content:
                    page = render(page_content(self._runs.readers, self._runs.title), follow=True).encode()
                    self._content = gzip.compress(page, compresslevel=1)
                    self._tag = f'"{hashlib.sha256(page).hexdigest()[:32]}"'
                self._read_at = time.monotonic()
            return self._content, self._tag


class ReportServer(ThreadingHTTPServer):
    """Answers requests for the page at one path with a secret, which other users of the machine do not know."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage, port: int) -> None:
        self.page, self.path = page, f"/{secrets.token_urlsafe(18)}/"
        self._slots = threading.BoundedSemaphore(MAX_THREADS)
        super().__init__((HOST, port), PageHandler)
        self.hosts = tuple(f"{name}:{self.server_port}" for name in (HOST, "localhost"))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}{self.path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            return self.shutdown_request(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that clients close."""


class PageHandler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = f"realhf/{__version__}", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in self.server.hosts:  # a name that resolves to this machine
            return self._refuse(421, "unknown host")
        if not hmac.compare_digest(self.path.partition("?")[0].encode(), self.server.path.encode()):
            return self._refuse(404, "not found")
        content, tag = self.server.page.current()
        if self.headers.get("If-None-Match") == tag:
            return self._answer(304, b"", {"ETag": tag})
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            return self._answer(200, content, {"ETag": tag, "Content-Encoding": "gzip"})
        self._answer(200, gzip.decompress(content), {"ETag": tag})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # every other method
            return lambda: self._refuse(405, "only GET is served")
        raise AttributeError(name)

    def _refuse(self, status: int, text: str) -> None:
        self._answer(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8", "Connection": "close"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        if status != 304:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: requests are polls."""


def serve(runs: RunSet, port: int) -> None:
    """Serve the page until interrupted."""
    page = LivePage(runs)
    try:
        server = ReportServer(page, port)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror or error}") from None
    with server:
        page.current()  # predictions take seconds
        print(f"report  {server.url}   Ctrl-C ends it", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("the report is no longer served", flush=True)
