"""The command line: joins the parts, computes nothing. A command is imported, and its options made, when asked for."""

from __future__ import annotations

import errno
import gc
import re
import sys
from collections.abc import Iterator
from copy import copy
from importlib import import_module
from inspect import cleandoc
from textwrap import shorten, wrap
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from loadgen.cli.streams import TolerantStream, protect
from loadgen.errors import (
    EXIT_CLIENT_LIMITED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SERVER,
    EXIT_USAGE,
    OutputError,
    PlanError,
)

COMMANDS = {
    "burst": "loadgen.cli.run",
    "run": "loadgen.cli.run",
    "matrix": "loadgen.cli.matrix",
    "report": "loadgen.cli.report",
    "compare": "loadgen.cli.compare",
    "export": "loadgen.cli.report",
    "limits": "loadgen.cli.limits",
    "simulate": "loadgen.cli.simulate",
    "twin": "loadgen.cli.twin",
    "plan-capacity": "loadgen.cli.capacity",
    "sweep": "loadgen.cli.sweep",
    "dissect": "loadgen.cli.dissect",
    "calibrate": "loadgen.cli.calibrate",
    "sim": "loadgen.cli.servers",
    "ui": "loadgen.cli.ui",
    "worker": "loadgen.cli.run",
    "servers": "loadgen.cli.servers",
}
"""Where the function, or the group of commands, of that name stands."""

SEPARATOR = "\0--"
"""What `compare` gets for `--`, which parts its runs. To a parser it ends the options, and swallows itself."""
TYPER_DEFAULTS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


OTHER_TOOLS_OPTIONS = {
    "--concurrency": "--arrivals closed:{}",
    "--max-concurrency": "--arrivals closed:{}",
    "--rate": "--arrivals poisson:{}",
    "--request-rate": "--arrivals poisson:{}",
    "--num-prompts": "--n {}",
    "--num-requests": "--n {}",
    "--request-count": "--n {}",
    "--dataset": "--workload jsonl:{0} (or sharegpt:{0})",
    "--dataset-path": "--workload jsonl:{0} (or sharegpt:{0})",
    "--base-url": "--url {}",
    "--backend": "--server {}",
    "--random-input-len": "--input-tokens {}",
    "--random-output-len": "--output-tokens {}",
}
"""What other load testers call options of a run, and what to write here."""
HEADINGS = ("Load", "Server", "Prompts", "Output")
HELP_ALL = "--help-all"
OPTIONS_ON_FIRST_SCREEN = 24
"""A command with more, some of them advanced, has a first screen, and --help-all."""


class GroupedCommand(TyperCommand):
    """Its help lists options under the heading that each of them names; it knows what others call them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises PlanError for an option of another load tester."""
        ours = {name for param in self.params for name in param.opts}
        for option, value in _option_values(args) if "--n" in ours else ():
            if option in OTHER_TOOLS_OPTIONS and option not in ours:
                write = OTHER_TOOLS_OPTIONS[option].format(value or "N")
                command = "" if write.split()[0] in ours else "loadgen run ... "
                raise PlanError(f"there is no {option}", f"Write: {command}{write}")
        if self.name == "compare":
            args = [SEPARATOR if each == "--" else each for each in args]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        """`--help-all` stands beside `--help` where that is one screen."""
        params = super().get_params(ctx)
        if self._has_advanced():
            own = cast("Any", params[-1])
            more: Any = copy(own)
            more.name, more.opts, more.callback = "help_all", [HELP_ALL], self._help_all
            more.help = "Explain every option, and exit."
            params.append(more)
        return params

    def _has_advanced(self) -> bool:
        """Whether it has so many options that the first screen only names the advanced ones."""
        return len(self.params) > OPTIONS_ON_FIRST_SCREEN and any(
            getattr(param, "rich_help_panel", None) == "Advanced" for param in self.params
        )

    def _help_all(self, ctx: Any, _: Any, asked: bool) -> None:
        if asked and not ctx.resilient_parsing:
            ctx.meta[HELP_ALL] = True
            typer.echo(ctx.get_help())
            ctx.exit()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Of advanced options only the names, unless all are asked for."""
        if not self._has_advanced() or HELP_ALL in ctx.meta:
            super().format_help(ctx, formatter)
            return
        self.format_usage(ctx, formatter)
        first = cleandoc(self.help or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
        formatter.write(f"{first.removesuffix('.')}.\n")
        rows = {  # the first name of each option, with the first clause of its help
            heading: [
                (each[0].split(maxsplit=1)[0].rstrip(","), re.split(r"[.;] |\.$", each[1])[0]) for each in section
            ]
            for heading, section in self._sections(ctx).items()
            if heading in {*HEADINGS, "Advanced"}
        }
        advanced = " ".join(name for name, _ in rows.pop("Advanced"))
        width = max(len(name) for row in rows.values() for name, _ in row)
        for heading, each in rows.items():
            for index, (name, text) in enumerate(each):
                told = shorten(text, formatter.width - width - 11, placeholder=" ...")
                formatter.write(f"{'' if index else heading:8} {name:{width}}  {told}\n")
        names = wrap(f"Advanced {advanced}", formatter.width, subsequent_indent="  ", break_on_hyphens=False)
        for line in names:
            formatter.write(f"{line}\n")
        formatter.write(f"{ctx.command_path} {HELP_ALL} explains them all, and the exit codes.\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = self._sections(ctx)
        for heading in sorted(sections, key=lambda heading: heading == "Options"):  # those of every command come last
            with formatter.section(heading):
                formatter.write_dl(sections[heading])

    def _sections(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{heading: [] for heading in HEADINGS}}
        for get_param in self.get_params(ctx):
            argument = get_param.param_type_name == "argument"
            heading = "Arguments" if argument else getattr(get_param, "rich_help_panel", None) or "Options"
            if record := get_param.get_help_record(ctx):
                sections.setdefault(heading, []).append(record)
        return {heading: rows for heading, rows in sections.items() if rows}


class LazyCommands(TyperGroup):
    """Makes a command when it is asked for."""

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            self.commands: Any = dict.fromkeys(COMMANDS)  # "did you mean" looks at the names here
            return None
        result = _load_command(name)
        if not isinstance(result, typer.Typer):
            function, result = result, typer.Typer(**TYPER_DEFAULTS)
            result.command(name, cls=GroupedCommand)(function)
        return typer.main.get_command(result)

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """By their docstrings alone: what it takes to make all their options is not imported."""
        width, rows = formatter.width - 6 - max(map(len, COMMANDS)), []
        for name in COMMANDS:
            result = _load_command(name)
            text = cleandoc(str(result.info.help if isinstance(result, typer.Typer) else result.__doc__))
            first = text.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].removesuffix(".")
            rows.append((name, shorten(f"{first}.", width, placeholder="...")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="loadgen",
    cls=LazyCommands,
    help="An exact load tester for LLM inference servers: vLLM, LightLLM and Hugging Face TGI.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands take it from here
    **TYPER_DEFAULTS | {"add_completion": True},
)


def main() -> None:
    """Entry point of the `loadgen` command. Errors become a message, a hint and an exit code."""
    out, _ = protect()
    try:
        if odd := [word for word in sys.argv if re.search("[\ud800-\udfff]", word)]:
            raise PlanError(f"not UTF-8: {odd[0]!r}", "Name files and folders in UTF-8.")
        try:
            app(prog_name="loadgen")
        finally:
            gc.freeze()  # or the interpreter looks through all that was imported as it ends: 30 ms
    except KeyboardInterrupt:
        print("loadgen: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as end:
        if not out.unfiltered.lost:
            raise
        sys.exit(_output_lost_code(out.unfiltered, end.code))
    except Exception as raised:
        if (code := _exit_code(error := _open_files_error(_disk_full_error(raised)))) is None:
            raise
        for line in getattr(error, "log_tail", "").splitlines():
            print(f"  | {line}", file=sys.stderr)
        print(f"loadgen: {error}", file=sys.stderr)
        if hint := getattr(error, "hint", ""):
            print(f"  {hint}", file=sys.stderr)
        sys.exit(code)


def _output_lost_code(stream: TolerantStream, code: str | int | None) -> str | int | None:
    """Say that standard output could not be written, and return the exit code: 2 if that text was all that the command
    was for, else the code of the measurement."""
    assert stream.error is not None
    print(f"loadgen: cannot write standard output: {stream.error.strerror}", file=sys.stderr)
    if stream.kept_in is not None:
        print(f"  The run and its results are in {stream.kept_in}.", file=sys.stderr)
    return EXIT_USAGE if stream.needed and code in (None, EXIT_OK) else code


def _disk_full_error(error: Exception) -> Exception:
    """Return an OutputError for a full disk, wherever it was noticed; any other error as it is."""
    if not isinstance(error, OSError) or error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return error
    what = error.filename or "a file"
    return OutputError(f"cannot write {what}: {error.strerror}", "Make room, also in the temporary folder; try again.")


def _open_files_error(error: Exception) -> Exception:
    """Return a ClientLimitError where this process or this machine has no file left; any other error as it is."""
    if not isinstance(error, OSError) or error.errno not in {errno.EMFILE, errno.ENFILE}:
        return error
    from loadgen.servers.errors import ClientLimitError

    where = "process" if error.errno == errno.EMFILE else "machine"
    return ClientLimitError(
        f"this {where} may open no more files: {error.strerror}", "Raise the limit: ulimit -n 65536"
    )


def _option_values(args: list[str]) -> Iterator[tuple[str, str]]:
    """Each word of a command line that may be an option, with what is given for it."""
    for word, following in zip(args, [*args[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        yield option, value if equals else following


def _load_command(name: str) -> Any:
    return getattr(import_module(COMMANDS[name]), name.replace("-", "_"))


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that is meant for the user; None for a bug of ours, which shows its traceback."""
    from loadgen.analysis.run.errors import RunFileError
    from loadgen.errors import LoadgenError
    from loadgen.servers.errors import (
        ClientLimitError,
        EndpointError,
        HostsError,
        LimitError,
        ModelError,
        SecretError,
        ServerError,
        VersionError,
    )
    from loadgen.servers.simulated import SimulatedError
    from loadgen.workloads.spec_syntax import WorkloadError

    ours = LoadgenError | RunFileError | WorkloadError | SimulatedError
    if isinstance(error, ours | EndpointError | HostsError | LimitError | ModelError | SecretError | VersionError):
        return EXIT_USAGE
    if isinstance(error, ClientLimitError):
        return EXIT_CLIENT_LIMITED
    return EXIT_SERVER if isinstance(error, ServerError) else None


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"loadgen {installed('llm-loadgen')}")
        raise typer.Exit
