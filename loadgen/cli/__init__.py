"""The command line: joins the parts and computes nothing. One file per command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loadgen.cli.burst import burst
from loadgen.cli.calibrate import calibrate
from loadgen.cli.compare import compare
from loadgen.cli.distributed import worker
from loadgen.cli.export import export
from loadgen.cli.matrix import matrix
from loadgen.cli.report import report
from loadgen.cli.run import run
from loadgen.cli.servers import servers
from loadgen.cli.sim import sim
from loadgen.cli.ui import ui
from loadgen.errors import EXIT_INTERRUPTED, EXIT_SERVER, EXIT_USAGE

app = typer.Typer(
    name="loadgen",
    help="An exact load tester for LLM inference servers: vLLM, LightLLM and Hugging Face TGI.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(burst)
app.command()(run)
app.command()(matrix)
app.command()(report)
app.command()(compare)
app.command()(export)
app.command()(calibrate)
app.command()(sim)
app.command()(ui)
app.command()(worker)
app.add_typer(servers, name="servers")


def main() -> None:
    """Entry point of the `loadgen` command. Errors become a message, a hint and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        print("loadgen: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        for line in getattr(error, "log_tail", "").splitlines():
            print(f"  | {line}", file=sys.stderr)
        print(f"loadgen: {error}", file=sys.stderr)
        if hint := getattr(error, "hint", ""):
            print(f"  {hint}", file=sys.stderr)
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that is meant for the user; None for a bug of ours, which shows its traceback."""
    from loadgen.errors import LoadgenError
    from loadgen.runfile import RunFileError
    from servers.errors import EndpointError, HostsError, LimitError, ServerError, VersionError
    from servers.simulated.errors import SimulatedError
    from workloads.prompts import PromptError
    from workloads.syntax import WorkloadError

    ours = LoadgenError | RunFileError | PromptError | WorkloadError | SimulatedError
    if isinstance(error, ours | EndpointError | HostsError | LimitError | VersionError):
        return EXIT_USAGE
    return EXIT_SERVER if isinstance(error, ServerError) else None


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"loadgen {installed('llm-loadgen')}")
        raise typer.Exit
