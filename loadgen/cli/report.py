"""`loadgen report`: rebuilds summary.json and report.html from run files, also of runs that were killed."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from loadgen.cli.output import Assertions, Goodput, Junit, Output, exit_code, folder_of


def report(
    runs: Annotated[
        list[Path],
        Argument(help="Run folders, their run.jsonl, or folders of repeats.", metavar="RUN...", show_default=False),
    ],
    out: Annotated[
        Path | None,
        Option(help="Where the page goes. Default: report.html in the run's folder, or here for several runs."),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print summary.json (a list for several runs) and no more.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
    serve: Annotated[
        bool, Option("--serve", help="Then show the page on a free port of loopback, until Ctrl-C.")
    ] = False,
    assertions: Assertions = None,
    goodput: Goodput = None,
    junit: Junit = None,
) -> None:
    """Rebuild summary.json and report.html from what a run recorded. Several runs share one page.

    Works on a run that was interrupted or killed and on a file with damaged lines, and says so in the report.
    Exit codes: 0 written, 2 not a run or not writable. With --assert a run is judged as if it had just ended: 4 an
    --assert failed, 1 requests failed and no --assert speaks of it, 5 the client was the limit, 130 interrupted.
    """
    page = out or (folder_of(runs[0]) if len(runs) == 1 else Path()) / "report.html"
    output = Output(as_json=as_json, quiet=quiet, assertions=assertions, goodput=goodput, junit=junit)
    summaries = output.results(runs, page)
    if serve:
        from analysis.report.serve import serving, url_of

        with serving(page.read_bytes()) as server, suppress(KeyboardInterrupt):
            print(f"{url_of(server)} shows it until Ctrl-C.", file=sys.stderr, flush=True)
            server.serve_forever()
    if output.objectives:
        raise Exit(exit_code(summaries))
