"""Our part of Locust's web page: exact figures under its own tables, checks of its form, and the report.

Locust's page is served as it is; two lines are put before `</body>`, and what they load fills a section below. Nothing
comes from the network. Locust answers any origin (CORS *); a page that can start load and read files must not, so
requests of other origins, and on loopback of other host names (DNS rebinding), are refused here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from flask import Flask, Response, jsonify, request, send_file

from loadgen.host import is_loopback
from loadgen.interactive.live_run import POINTS, SHARES, LiveRun
from loadgen.interactive.session import EXPECTED, LocustSession
from loadgen.plan import Plan
from workloads import workload

HERE = Path(__file__).parent
ASSETS = {"live.js": "text/javascript", "live.css": "text/css"}
INSERTED = (
    b'<link rel="stylesheet" href="./loadgen/live.css" /><section id="loadgen"></section>'
    b'<script src="./loadgen/live.js"></script></body>'
)
REPORT_LIMIT_S = 300
TABLE = {
    "key": "latencies",
    "title": "Latencies",
    "structure": [
        {"key": "title", "title": "Exact, of complete requests"},
        {"key": "n", "title": "Samples"},
        *({"key": name, "title": f"{name} (ms)"} for name in (*SHARES, "max")),
    ],
}
"""A tab beside Locust's own."""


def extend(web_ui: Any, session: LocustSession) -> None:
    """Add our routes, tab and section to Locust's page."""
    app: Flask = web_ui.app
    app.debug = False
    web_ui.template_args["extended_tables"] = [TABLE]
    web_ui.template_args["extended_tabs"] = [{"key": TABLE["key"], "title": TABLE["title"]}]
    web_ui.template_args["extended_csv_files"] = [
        {"href": "./loadgen/report", "title": "Download loadgen report"},
        {"href": "./loadgen/run", "title": "Download run file"},
    ]
    base = web_ui.environment.parsed_options.web_base_path or ""
    app.before_request(lambda: _refused(web_ui.host) or _unfit(session, web_ui, base))
    # The first of them runs last: after flask_cors has put its header on.
    app.after_request_funcs.setdefault(None, []).insert(0, lambda answer: _completed(answer, session, base))
    for name, answer in (("live", _live), ("report", _report), ("run", _run)):
        view = web_ui.auth_required_if_enabled(partial(answer, session))
        app.add_url_rule(f"{base}/loadgen/{name}", f"loadgen_{name}", view)
    app.add_url_rule(f"{base}/loadgen/<any(live.js, live.css):name>", "loadgen_asset", _asset)


def _asset(name: str) -> Response:
    return Response((HERE / name).read_bytes(), mimetype=ASSETS[name], headers={"Cache-Control": "no-cache"})


# What is refused.


def _refused(bound: str) -> Response | None:
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return Response("requests from other pages are refused", 403)
    if is_loopback(bound) and not is_loopback(_name(request.host)):
        return Response("this page answers to loopback names only", 403)
    return None


def _name(host: str) -> str:
    """A Host field without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _unfit(session: LocustSession, web_ui: Any, base: str) -> Response | None:
    """A start form that cannot be run is answered with its mistakes, in the form."""
    if request.method != "POST" or request.path != f"{base}/swarm":
        return None
    try:
        plan = session.plan(request.form)
        if session.running:
            kept = session.same_workload(plan)
            return None if kept else _mistake("The workload is chosen at the start: stop first.", web_ui)
        if not is_loopback(web_ui.host) and not _files(plan) <= _files(session.plan()):
            return _mistake(
                "Files can be named here only while the page is on loopback: name them when starting.", web_ui
            )
        given = request.form.get("host", "").rstrip("/")
        if session.target is not None and given and given != session.target.facts.url:
            session.move(given)
        session.choose(session.plan(request.form))
    except EXPECTED as error:
        return _mistake(f"{error} {getattr(error, 'hint', '')}".strip(), web_ui)
    return None


def _files(plan: Plan) -> set[str]:
    """What these words would have this process read."""
    lengths = (str(plan.input_tokens), str(plan.output_tokens))
    named = {words for words in lengths if words.startswith("empirical:")}
    path = getattr(workload.parse(plan.workload), "path", None)
    return named if path is None else named | {str(path)}


def _mistake(text: str, web_ui: Any) -> Response:
    return jsonify({"success": False, "message": text, "host": web_ui.environment.host})


# What is shown.


def _completed(answer: Response, session: LocustSession, base: str) -> Response:
    answer.headers.pop("Access-Control-Allow-Origin", None)
    if request.path == f"{base}/" and answer.mimetype == "text/html" and answer.status_code == 200:
        answer.set_data(answer.get_data().replace(b"</body>", INSERTED))
    elif request.path == f"{base}/stats/requests" and answer.is_json and session.run is not None:
        found = answer.get_json()
        found["extended_stats"] = [{"key": TABLE["key"], "data": [_row(row) for row in session.run.latency()]}]
        answer.set_data(jsonify(found).get_data())
    return answer


def _row(figure: dict[str, Any]) -> dict[str, Any]:
    milliseconds = {name: "" if figure[name] is None else f"{figure[name] * 1000:.3f}" for name in (*SHARES, "max")}
    return {"title": figure["title"], "n": figure["n"], **milliseconds}


def _live(session: LocustSession) -> Response:
    shown = ("name", "version", "model", "url", "simulated", "speed")
    server = {name: getattr(session.target.facts, name) for name in shown} if session.target else None
    return jsonify({"server": server, "run": _shown(session, session.run) if session.run else None})


def _shown(session: LocustSession, run: LiveRun) -> dict[str, Any]:
    since = request.args.get("since", 0, type=int)
    figures = run.figures
    return {
        "folder": str(run.folder),
        "ended": run.ended,
        "requests": {"in_flight": len(run.in_flight), "users": session.users, **figures.states},
        "tokens": figures.tokens,
        "latency": run.latency(),
        "failures": [
            {"kind": kind, "detail": detail, "n": number} for (kind, detail), number in figures.failures.most_common(50)
        ],
        "client": run.client(),
        "points": [point for point in figures.points if point["at"] >= since],
        "point_limit": POINTS,
    }


def _run(session: LocustSession) -> Response:
    if session.run is None:
        return Response("nothing has been run yet", 404)
    return send_file(session.run.folder.resolve() / "run.jsonl", as_attachment=True, mimetype="application/jsonl")


def _report(session: LocustSession) -> Response:
    """`loadgen report` on the run so far, in a process of its own, so that this one goes on."""
    if session.run is None:
        return Response("nothing has been run yet", 404)
    folder = session.run.folder.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        page = folder / "report.html" if session.run.ended else Path(scratch) / "report.html"
        command = [sys.executable, "-m", "loadgen", "report", str(folder), "--out", str(page), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_LIMIT_S, check=False)  # noqa: S603
        if done.returncode:
            return Response(done.stderr, 500, mimetype="text/plain")
        named = {"Content-Disposition": f'attachment; filename="{folder.name}.html"'}
        return Response(page.read_bytes(), mimetype="text/html", headers=named)
