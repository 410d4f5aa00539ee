"""Renders a document into one HTML file that needs nothing else: no network, no second file, no library at hand.

Text that came from a server is escaped by the template and, in the charts' data, by writing `<`, `>` and `&` as JSON
escapes. The page's policy lets only the scripts run whose hashes it names (Content Security Policy Level 3, section
2.3.1), so that markup in a server's words could do nothing even if it got through.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.report.charts import PALETTE
from analysis.report.document import Block, ChartRef, Document, Scorecard

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

HERE = Path(__file__).parent
SCRIPTS = ("plotly-basic.min.js", "charts.js", "tables.js")


def render(document: Document) -> str:
    """The page of a document."""
    scripts = [_file(name) for name in (*SCRIPTS, *document.scripts)]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            document=document,
            anchors={section.id for section in document.sections},
            marks_differ=len({run.mark for run in document.runs}) > 1,
            policy=_policy(scripts),
            style=_style(),
            scripts=scripts,
            data=_json(document.data),
        )
    )


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "grouped": _grouped, "kind": lambda block: type(block).__name__}
    return environment


def _code(text: str) -> Markup:
    """The text, escaped, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped right here


def _grouped(blocks: Iterable[Block]) -> list[tuple[str, list[Block]]]:
    """Neighbours that stand side by side: scorecards, and charts that are not as wide as the page."""

    def side_by_side(block: Block) -> str:
        if isinstance(block, ChartRef):
            return "" if block.shape else "charts"
        return "Scorecard" if isinstance(block, Scorecard) else ""

    groups = [(kind, list(group)) for kind, group in groupby(blocks, side_by_side)]
    return [("" if kind == "charts" and len(group) == 1 else kind, group) for kind, group in groups]


def _style() -> str:
    """page.css, with the palette's colours for light and dark."""
    light, dark = ("".join(f"--{name}:{each[place]};" for name, each in PALETTE.items()) for place in (0, 1))
    classes = "".join(f".{name}{{--run:var(--{name})}}" for name in PALETTE)
    scheme = f"@media (prefers-color-scheme:dark){{:root:not(.on-paper){{{dark}}}}}"
    return f":root{{{light}}}{scheme}{classes}\n{_file('page.css')}"


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _json(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
