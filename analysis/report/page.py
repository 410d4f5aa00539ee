"""Renders a document into one HTML file that needs nothing else: no network, no second file, no library at hand; and
shows it on loopback, for a browser that cannot open files or sits behind a tunnel.

Text that came from a server is escaped by the template and, in the charts' data, by writing `<`, `>` and `&` as JSON
escapes. The page's policy lets only the scripts run whose hashes it names (Content Security Policy Level 3, section
2.3.1), so that markup in a server's words could do nothing even if it got through.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup, escape

from loadgen.analysis.report import Block, ChartRef, Document, Scorecard
from loadgen.analysis.report.charts import PALETTE

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

HERE = Path(__file__).parent
PLOTLY = "plotly-basic.min.js"
"""Held compressed, a third of its size; charts.js unpacks and runs it once the first screen is there."""
SCRIPTS = ("charts.js", "tables.js")
HOST = "127.0.0.1"
TIMEOUT_S = 10.0
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # beside the policy in the page, which cannot say this
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class TemplateCache(BytecodeCache):
    """Templates as Python compiled them, where it keeps what it compiles; that takes longer than a page. Neither where
    it must not write there, nor where it cannot."""

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError, EOFError, UnpicklingError), self._file(bucket).open("rb") as stream:
            bucket.load_bytecode(stream)

    def dump_bytecode(self, bucket: Bucket) -> None:
        fresh = self._file(bucket).with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            if not sys.dont_write_bytecode:
                fresh.write_bytes(bucket.bytecode_to_string())
                fresh.replace(self._file(bucket))

    def _file(self, bucket: Bucket) -> Path:
        return HERE / "__pycache__" / f"{bucket.key}.jinja"


def render(document: Document) -> str:
    """The page of a document."""
    loader = FileSystemLoader(HERE, encoding="utf-8")
    environment = Environment(
        loader=loader,
        bytecode_cache=TemplateCache(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "grouped": _grouped, "kind": lambda block: type(block).__name__}
    scripts = [_file(name) for name in (*SCRIPTS, *document.scripts)]
    hashes = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (_file(PLOTLY), *scripts)
    )
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    )
    data = json.dumps(document.data, separators=(",", ":"), allow_nan=False)
    return environment.get_template("page.html.j2").render(
        document=document,
        anchors={section.id for section in document.sections},
        marks_differ=len({run.mark for run in document.runs}) > 1,
        policy=f"{policy}; form-action 'none'",
        style=_style(document.mark),
        plotly=_packed(PLOTLY),
        scripts=scripts,
        data=data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
    )


def page_server(page: bytes) -> ThreadingHTTPServer:
    """A server of this page and nothing else, on an ephemeral port of loopback; the caller runs and closes it."""

    from http import HTTPStatus
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD of `/` to whoever calls it by its loopback name."""

        server_version, sys_version = "loadgen", ""
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            _, port = self.connection.getsockname()
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                # A name of somebody else's that leads here: a page of theirs must not read this one (DNS rebinding).
                status, body = HTTPStatus.MISDIRECTED_REQUEST, b""
            else:
                here = self.path.partition("?")[0] == "/"
                status, body = (HTTPStatus.OK, page) if here else (HTTPStatus.NOT_FOUND, b"")
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
            """Nothing: the terminal is for the address."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    return server


def _code(text: str) -> Markup:
    """The text, escaped, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped right here


def _grouped(blocks: Iterable[Block]) -> list[tuple[str, list[Block]]]:
    """Neighbours that stand side by side: scorecards, and charts that are not as wide as the page."""

    def side_by_side(block: Block) -> str:
        if isinstance(block, ChartRef):
            return "" if block.shape else "charts"
        return "Scorecard" if isinstance(block, Scorecard) else ""

    groups = [(kind, list(group)) for kind, group in groupby(blocks, side_by_side)]
    return [("" if kind == "charts" and len(group) == 1 else kind, group) for kind, group in groups]


def _style(mark: str) -> str:
    """page.css, with the palette's colours for light and dark, and the mark at the head of each printed page."""
    light, dark = ("".join(f"--{name}:{each[index]};" for name, each in PALETTE.items()) for index in (0, 1))
    classes = "".join(f".{name}{{--run:var(--{name})}}" for name in PALETTE)
    scheme = f"@media (prefers-color-scheme:dark){{:root:not(.on-paper){{{dark}}}}}"
    printed = f"@page{{@top-right{{content:{json.dumps(mark)}}}}}" if mark else ""
    return f":root{{{light}}}{scheme}{classes}\n{_file('page.css')}{printed}"


@cache
def _packed(name: str) -> str:
    """A file as gzip in base64, the same bytes each time."""
    return base64.b64encode(gzip.compress((HERE / name).read_bytes(), mtime=0)).decode()


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
