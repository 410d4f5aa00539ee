"""The command line: joins the parts and computes nothing. One file per command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loadgen.cli.burst import burst
from loadgen.cli.sim import sim

app = typer.Typer(
    name="loadgen",
    help="An exact load tester for LLM inference servers: vLLM, LightLLM and Hugging Face TGI.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(burst)
app.command()(sim)


def main() -> None:
    """Entry point of the `loadgen` command. Errors become a message, a hint and an exit code."""
    from loadgen.errors import EXIT_INTERRUPTED, EXIT_SERVER, LoadgenError
    from servers.errors import ServerError

    try:
        app()
    except (LoadgenError, ServerError) as error:
        print(f"loadgen: {error}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, LoadgenError) else EXIT_SERVER)
    except KeyboardInterrupt:
        print("loadgen: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"loadgen {installed('llm-loadgen')}")
        raise typer.Exit
