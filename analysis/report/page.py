"""Renders a document as a self-contained HTML page, and serves the page over HTTP on the loopback interface.

The page needs no network and no other files. `page_server` is for browsers that cannot open local files, such as a
browser that reaches this machine through an SSH tunnel.

A page contains text from the tested server, which must not be able to run scripts:

- The template escapes all text. In the JSON data of the charts, `<`, `>` and `&` are escaped.
- The Content Security Policy (level 3, section 2.3.1) only allows scripts whose hashes it lists.
"""

from __future__ import annotations

import base64
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

from loadgen.analysis.report import Block, ChartRef, Disclosure, Document, Scorecard, Section
from loadgen.analysis.report.charts import PALETTE
from loadgen.analysis.report.packing import packed

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

HERE = Path(__file__).parent
PLOTLY = "plotly-basic.min.js"
"""The chart library. The page contains it compressed, at a third of its size. charts.js runs the library once the first
screen is visible."""
SCRIPTS = ("gunzip.js", "charts.js", "tables.js")
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
    """Caches compiled Jinja templates in `__pycache__`, because compiling templates takes longer than rendering a page.

    The cache is not written if `sys.dont_write_bytecode` is set or if the folder is not writable.
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
    """Return the document as a self-contained HTML page."""
    loader = FileSystemLoader(HERE, encoding="utf-8")
    environment = Environment(
        loader=loader,
        bytecode_cache=TemplateCache(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "grouped": _grouped, "is_folded": _is_folded}
    environment.filters["unbroken"] = _unbroken
    environment.filters["kind"] = lambda block: type(block).__name__
    scripts = [_file(name) for name in (*SCRIPTS, *document.scripts)]
    hashes = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (plotly_source(), *scripts)
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
        plotly=_packed_plotly(),
        scripts=scripts,
        data=data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
    )


def page_server(page: bytes) -> ThreadingHTTPServer:
    """Return an HTTP server that serves only this page, on an ephemeral port of the loopback interface.

    The caller must run and close the server."""

    from http import HTTPStatus
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD requests for `/` with the page. The Host header must name the loopback interface."""

        server_version = "loadgen"
        sys_version = ""
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            _, port = self.connection.getsockname()
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                # DNS rebinding: a foreign host name resolves to loopback. Pages of that host must not read this page.
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
            """Suppress the request log, which would otherwise clutter the terminal."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    return server


def _code(text: str) -> Markup:
    """Escape the text for HTML and convert parts between backticks to `<code>` elements."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped right here


def _unbroken(text: str) -> str:
    """Return `text` with non-breaking spaces between numbers and time units, for example in `3 ms`."""
    return re.sub(r"(?<=\d) (?=(?:s|ms|µs)\b)", "\u00a0", text)


def _grouped(blocks: Iterable[Block]) -> list[tuple[str, list[Block]]]:
    """Divide the blocks of a page into groups of consecutive blocks, and return the kind and the blocks of each group.

    The kind says how the page shows the group:

    - `Scorecard`: scorecards, which are shown side by side.
    - `charts`: two or more charts that are narrower than the page. They are shown side by side.
    - An empty string: any other blocks, which are shown one below the other.
    """

    def group_key(block: Block) -> str:
        if isinstance(block, ChartRef):
            return "" if block.shape else "charts"
        return "Scorecard" if isinstance(block, Scorecard) else ""

    groups = [(kind, list(group)) for kind, group in groupby(blocks, group_key)]
    return [("" if kind == "charts" and len(group) == 1 else kind, group) for kind, group in groups]


def _is_folded(section: Section) -> bool:
    """Return True if the section is collapsed: its only block is hidden until the reader clicks the heading."""
    return [isinstance(block, Disclosure) and not block.summary for block in section.blocks] == [True]


def _style(mark: str) -> str:
    """Return page.css with the colours of the palette. Each printed page shows `mark`, such as SIMULATED."""
    light = "".join(f"--{name}:{colour};" for name, (colour, _) in PALETTE.items())
    dark = "".join(f"--{name}:{colour};" for name, (_, colour) in PALETTE.items())
    classes = "".join(f".{name}{{--run:var(--{name})}}" for name in PALETTE)
    scheme = f"@media (prefers-color-scheme:dark){{:root:not(.on-paper){{{dark}}}}}"
    printed = f"@page{{@top-right{{content:{json.dumps(mark)}}}}}" if mark else ""
    return f":root{{{light}}}{scheme}{classes}\n{_file('page.css')}{printed}"


@cache
def plotly_source() -> str:
    """Return the source of the chart library, with parentheses around its outermost function.

    Browsers compile a function in parentheses at once. They parse any other function twice: first for its syntax, and
    again for its code when it is called. For a library of this size, the first pass takes 10 to 20% of the time that a
    page needs until its first chart."""
    source = _file(PLOTLY).rstrip().replace("self : this, () => {", "self : this, (() => {", 1)
    return f"{source.removesuffix('}));')}}})));\n"


@cache
def _packed_plotly() -> str:
    return packed(plotly_source().encode())


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
