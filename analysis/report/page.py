"""Renders a document as one self-contained HTML file, and serves that file on loopback.

The file needs no network, no other file and no installed library. Serving it helps a browser that cannot open local
files, or that runs at the other end of a tunnel. The template escapes all text. In the data of the charts, `<`, `>` and
`&` are written as JSON escapes. The Content Security Policy (level 3, section 2.3.1) allows only scripts with listed
hashes. Even unescaped markup from a server could therefore not run a script.
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
"""Embedded compressed, at a third of its size. charts.js unpacks and runs it after the first screen is shown."""
SCRIPTS = ("charts.js", "tables.js")
HOST = "127.0.0.1"
TIMEOUT_S = 10.0
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # a policy inside a page cannot contain this directive
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class TemplateCache(BytecodeCache):
    """Caches compiled templates in `__pycache__`, because compiling them takes longer than rendering a page.

    The cache is not written if bytecode is disabled (`sys.dont_write_bytecode`), or if the folder is not writable.
    """

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
    """Return a document as a self-contained HTML page."""
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
    allowed = " ".join(f"'sha256-{script_hash}'" for script_hash in hashes)
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
    """Return an HTTP server for this page alone, on an ephemeral loopback port. The caller runs and closes it."""

    from http import HTTPStatus
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD requests for `/` whose Host header names the loopback address."""

        server_version = "loadgen"
        sys_version = ""
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            _, port = self.connection.getsockname()
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                # Another host name resolves to loopback (DNS rebinding). Its pages must not be able to read this one.
                status, body = HTTPStatus.MISDIRECTED_REQUEST, b""
            elif self.path.partition("?")[0] == "/":
                status, body = HTTPStatus.OK, page
            else:
                status, body = HTTPStatus.NOT_FOUND, b""
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
            """Log nothing, because the terminal shows the address of the page."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    return server


def _code(text: str) -> Markup:
    """Return the text escaped, with the parts between backticks as `<code>` elements."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped right here


def _grouped(blocks: Iterable[Block]) -> list[tuple[str, list[Block]]]:
    """Group neighbouring blocks that are shown side by side: scorecards, and charts narrower than the page."""

    def group_key(block: Block) -> str:
        if isinstance(block, ChartRef):
            return "" if block.shape else "charts"
        return "Scorecard" if isinstance(block, Scorecard) else ""

    groups = [(kind, list(group)) for kind, group in groupby(blocks, group_key)]
    return [("" if kind == "charts" and len(group) == 1 else kind, group) for kind, group in groups]


def _style(mark: str) -> str:
    """Return page.css with the colours of the palette, and with the mark in the header of each printed page."""
    light = "".join(f"--{name}:{colour};" for name, (colour, _) in PALETTE.items())
    dark = "".join(f"--{name}:{colour};" for name, (_, colour) in PALETTE.items())
    classes = "".join(f".{name}{{--run:var(--{name})}}" for name in PALETTE)
    scheme = f"@media (prefers-color-scheme:dark){{:root:not(.on-paper){{{dark}}}}}"
    printed = f"@page{{@top-right{{content:{json.dumps(mark)}}}}}" if mark else ""
    return f":root{{{light}}}{scheme}{classes}\n{_file('page.css')}{printed}"


@cache
def _packed(name: str) -> str:
    """Return a file as base64-encoded gzip. The result is the same every time."""
    return base64.b64encode(gzip.compress((HERE / name).read_bytes(), mtime=0)).decode()


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
