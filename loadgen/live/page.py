"""The web page that shows the progress of a run: its HTML, and its server in a separate process.

`LivePage` belongs to the process that waits for the workers. It starts the server (loadgen.live.page_server) and sends
it one JSON object per line: `{"title"}` when a run starts, then `{"snapshot"}` a few times per second, and `{"note"}`
at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.errors import OutputError, PlanError
from loadgen.live.snapshot import INTERVAL_S, History, LiveSnapshot, PlannedEnd, SnapshotTaker
from loadgen.servers.lifeline import lifeline
from loadgen.servers.own_process import own_process

if TYPE_CHECKING:
    from loadgen.engine.client_health import LiveCounters

FOLDER = Path(__file__).parent
SAVED_NAME = "live.html"
"""Name of the saved page in the folder of a run."""
MAX_LINE_BYTES = 4096
"""Maximum size of a line for the server: a pipe takes this many bytes (PIPE_BUF) completely or not at all."""
START_LIMIT_S = 10.0
"""Maximum time until the server has started."""
END_LIMIT_S = 5.0
"""Maximum time until the server has sent the end of the run to every open page."""


@cache
def _template() -> Any:
    from jinja2 import Environment

    # The page contains no values apart from those that `render` has made safe.
    return Environment(autoescape=False).from_string((FOLDER / "page.html").read_text("utf-8"))  # noqa: S701


def render(
    title: str, snapshots: Sequence[LiveSnapshot], *, note: str = "", live: bool = False, nonce: str = ""
) -> str:
    """Return the HTML page that shows the progress of a run.

    - With `live`, the page receives further snapshots as server-sent events from the relative URL `events`. Without it,
      the page only shows `snapshots`.
    - `note` is a message on the page, for example that the command has ended.
    - `nonce` is the random value that the page's Content-Security-Policy requires.
    """
    data = {"title": title, "snapshots": [msgspec.to_builtins(one) for one in snapshots], "note": note, "live": live}
    # "<" could end the script element that contains the data.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    css, js = ((FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js"))
    return str(_template().render(nonce=nonce, css=css, js=js, data=text))


class LivePage:
    """The live page of a command. It may show several runs, one after the other."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        assert process.stdin is not None
        self.url = url
        self._process = process
        self._pipe = process.stdin.fileno()
        self._title = ""
        self._history = History()
        self._taker = SnapshotTaker(PlannedEnd(), time.monotonic)
        self._sent_s = 0.0

    def begin(self, end: PlannedEnd) -> None:
        """Begin to show a new run. `end` contains the limits that end the run."""
        self._title = ""
        self._history = History()
        self._taker = SnapshotTaker(end, time.monotonic)

    def name(self, title: str) -> None:
        """Set the title of the page if the current run does not have a title yet."""
        if not self._title:
            self._title = title
            self._send({"title": title[:1_000]})

    def show(self, phase: str, counts: LiveCounters) -> None:
        """Send the state of the run to the page, at most a few times per second.

        Further calls do nothing, except that the final state of the run is always sent.
        """
        now_s = time.monotonic()
        if phase != "ended" and now_s - self._sent_s < INTERVAL_S:
            return
        self._sent_s = now_s
        snapshot = self._taker.take(phase, counts)
        if self._history.add(snapshot):
            self._send({"snapshot": msgspec.to_builtins(snapshot)})

    def save(self, folder: Path) -> Path:
        """Write the page with the whole history of the run to its folder.

        Raises OutputError if the file cannot be written.
        """
        path = folder / SAVED_NAME
        try:
            path.write_text(render(self._title, self._history.snapshots, note="Saved page of a run."), "utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write {path}: {error.strerror}", "The results are complete without it."
            ) from error
        return path

    def close(self, note: str) -> None:
        """Show `note`, a message that the command has ended, on every open page. Then stop the page's web server."""
        assert self._process.stdin is not None
        self._send({"note": note[:1_000]})
        self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message to the page's server.

        If the server does not read its messages, the message is dropped, so that the run never waits.
        """
        line = json.dumps(message).encode() + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            with contextlib.suppress(OSError):
                os.write(self._pipe, line)


@contextlib.contextmanager
def open_page(port: int) -> Iterator[LivePage]:
    """Serve the page on this port of 127.0.0.1 until the block ends. With port 0, a free port is chosen.

    Raises PlanError if the port cannot be used.
    """
    process = subprocess.Popen(  # noqa: S603 - our own module, with a number as its only argument
        own_process("loadgen.live.page_server", str(port)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # an interrupt must not end the page before the run has ended
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with lifeline(process.stdin), process.stdout as answers:
        answer = json.loads(answers.readline() or b"{}")
        if "port" not in answer:
            process.stdin.close()
            process.wait(START_LIMIT_S)
            raise PlanError(
                f"--live cannot use port {port}: {answer.get('error', 'its server did not start')}",
                "Use another --live-port, or leave it out for a free port.",
            )
        os.set_blocking(process.stdin.fileno(), False)
        page = LivePage(process, f"http://127.0.0.1:{answer['port']}/")
        try:
            yield page
        finally:
            page.close("The run has ended.")
