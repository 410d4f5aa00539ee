"""Serves the live page on 127.0.0.1: `python -m loadgen.live.page_server PORT`.

    GET /           the page
    GET /events     the snapshots as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)
    GET /live.html  the page with all snapshots so far, as one file

The process reads its messages from standard input, see loadgen.live.page. It writes its port to standard output, and
ends when its standard input ends.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import msgspec

from loadgen.live.page import SAVED_NAME, render
from loadgen.live.snapshot import History, LiveSnapshot

HOST = "127.0.0.1"
MAX_PAGES = 16
"""Maximum number of pages that receive events at the same time."""
GOODBYE_S = 2.0
"""Maximum time in which the open pages receive the end of the run."""

Event = tuple[str, Any]
"""Name and data of a server-sent event."""


class Board:
    """The messages of the current run, and one queue of events for each browser page that shows the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[Queue[Event]] = []
        self._title = ""
        self._history = History()
        self._note: str | None = None

    def receive(self, message: dict[str, Any]) -> None:
        """Store a message from the process that waits for the workers, and pass it to all open pages."""
        with self._lock:
            if "title" in message:
                self._title = message["title"]
                self._history = History()
                self._publish(self._run_event())
            elif "snapshot" in message:
                self._history.snapshots.append(msgspec.convert(message["snapshot"], LiveSnapshot))
                self._publish(("snapshot", message["snapshot"]))
            elif "note" in message:
                self._note = message["note"]
                self._publish(("end", {"note": self._note}))

    def join(self) -> Queue[Event] | None:
        """Return the event queue of a browser page that was just opened. The queue begins with all messages so far.

        Return None if there are too many pages.
        """
        queue: Queue[Event] = Queue()
        with self._lock:
            if len(self._queues) >= MAX_PAGES:
                return None
            queue.put(self._run_event())
            if self._note is not None:
                queue.put(("end", {"note": self._note}))
            self._queues.append(queue)
        return queue

    def leave(self, queue: Queue[Event]) -> None:
        """Remove the event queue of a browser page that was closed."""
        with self._lock:
            self._queues.remove(queue)

    @property
    def pages(self) -> int:
        """Return the number of open pages."""
        return len(self._queues)

    def saved_page(self) -> str:
        """Return the page with all snapshots so far."""
        with self._lock:
            return render(self._title, self._history.snapshots, note="Saved page of a run.")

    def _run_event(self) -> Event:
        return "run", {"title": self._title, "snapshots": msgspec.to_builtins(self._history.snapshots)}

    def _publish(self, event: Event) -> None:
        for queue in self._queues:
            queue.put(event)


class LivePageHandler(BaseHTTPRequestHandler):
    """Answers the requests of browsers on this machine."""

    protocol_version = "HTTP/1.1"
    board: Board
    allowed_hosts: frozenset[str]

    def do_GET(self) -> None:
        """Answer a GET request. A request with a foreign Host header is refused, because another web page may have sent
        it.
        """
        if self.headers.get("Host", "") not in self.allowed_hosts:
            self._answer(403, "This page is only for this machine.\n", "text/plain")
        elif self.path == "/":
            nonce = secrets.token_urlsafe(16)
            page = render("", [], live=True, nonce=nonce, note="The page is saved as live.html when the run ends.")
            self._answer(200, page, "text/html", nonce)
        elif self.path == f"/{SAVED_NAME}":
            self._answer(200, self.board.saved_page(), "application/octet-stream")
        elif self.path == "/events":
            self._send_events()
        else:
            self._answer(404, "Not found. The page is at /.\n", "text/plain")

    def _answer(self, status: int, text: str, content_type: str, nonce: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        own = f"'nonce-{nonce}'"
        policy = (
            f"default-src 'none'; connect-src 'self'; img-src data:; script-src {own}; style-src {own}; "
            if nonce
            else ""
        )
        self.send_header(
            "Content-Security-Policy", f"{policy}frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        self.end_headers()
        self.wfile.write(body)

    def _send_events(self) -> None:
        """Send events until the run has ended or the browser has closed the connection."""
        queue = self.board.join()
        if queue is None:
            self._answer(503, "Too many pages are open.\n", "text/plain")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            name = ""
            while name != "end":
                name, data = queue.get()
                self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
                self.wfile.flush()
        except OSError:
            pass  # the browser has closed the page
        finally:
            self.board.leave(queue)

    def log_message(self, *_: object) -> None:
        """Print nothing, because the terminal shows the progress of the run."""


def _tell(line: str) -> None:
    """Write a line to stdout, which the parent process reads."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the live page of a run until standard input ends.

    Each line of standard input is a message about the run.
    """
    board = Board()
    try:
        server = ThreadingHTTPServer((HOST, int(sys.argv[1])), LivePageHandler)
    except (OSError, OverflowError) as error:
        _tell(json.dumps({"error": getattr(error, "strerror", None) or str(error)}))
        return
    server.daemon_threads = True
    port = server.server_address[1]
    LivePageHandler.board = board
    LivePageHandler.allowed_hosts = frozenset(f"{name}:{port}" for name in (HOST, "localhost"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _tell(json.dumps({"port": port}))
    for line in sys.stdin:
        board.receive(json.loads(line))
    board.receive({"note": "The run has ended."})
    deadline_s = time.monotonic() + GOODBYE_S
    while board.pages and time.monotonic() < deadline_s:
        time.sleep(0.02)
    server.shutdown()


if __name__ == "__main__":
    main()
