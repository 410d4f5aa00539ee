"""The command line. It imports a command's module and builds the command's options only when the command is used."""

from __future__ import annotations

import errno
import gc
import os
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
"""Module of each command. The module defines a function or a Typer group with the command's name."""

SEPARATOR = "\0--"
"""Replaces the `--` between the two sides of `compare`. The option parser would remove a plain `--`."""
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
"""Options of other load testers, and the equivalent options of loadgen."""
HEADINGS = ("Load", "Server", "Prompts", "Output")
HELP_ALL = "--help-all"
SHORT_HELP_ABOVE = 24
"""Commands with more options print a short help for --help, and the complete help for --help-all."""


class GroupedCommand(TyperCommand):
    """A command whose help groups options under headings.

    The command also recognises options of other load testers, and names the loadgen option to use instead.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command. Raises PlanError for an option of another load tester."""
        known = {name for param in self.params for name in param.opts}
        for option, value in _option_values(args) if "--n" in known else ():
            if option in OTHER_TOOLS_OPTIONS and option not in known:
                replacement = OTHER_TOOLS_OPTIONS[option].format(value or "N")
                command = "" if replacement.split()[0] in known else "loadgen run ... "
                raise PlanError(f"there is no {option}", f"Write: {command}{replacement}")
        urls = {value for option, value in _option_values(args) if option == "--url"}
        if len(urls) > 1:
            from loadgen.servers.auth import ONE_SERVER

            raise PlanError(f"--url is given {len(urls)} times, but {ONE_SERVER}", "Nothing was sent.")
        if self.name == "compare":
            args = [SEPARATOR if word == "--" else word for word in args]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        """Return the command's parameters. Commands with a short help also get the option `--help-all`."""
        params = super().get_params(ctx)
        if self._has_short_help():
            help_option = cast("Any", params[-1])
            help_all: Any = copy(help_option)
            help_all.name = "help_all"
            help_all.opts = [HELP_ALL]
            help_all.callback = self._help_all
            help_all.help = "Explain all options and exit."
            params.append(help_all)
        return params

    def _has_short_help(self) -> bool:
        """Return True if `--help` prints only the short help of this command.

        That is the case if the command has more than SHORT_HELP_ABOVE options and some of them are advanced.
        """
        return len(self.params) > SHORT_HELP_ABOVE and any(
            getattr(param, "rich_help_panel", None) == "Advanced" for param in self.params
        )

    def _help_all(self, ctx: Any, _: Any, requested: bool) -> None:
        if requested and not ctx.resilient_parsing:
            ctx.meta[HELP_ALL] = True
            typer.echo(ctx.get_help())
            ctx.exit()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help. The short help has one line per option, and lists advanced options by name only."""
        if not self._has_short_help() or HELP_ALL in ctx.meta:
            super().format_help(ctx, formatter)
            return
        self.format_usage(ctx, formatter)
        formatter.write(f"{_first_sentence(self.help or '')}\n")
        sections = self._sections(ctx)
        advanced = [_first_name(names) for names, _ in sections["Advanced"]]
        rows = {
            heading: [(_first_name(names), _first_clause(text)) for names, text in section]
            for heading, section in sections.items()
            if heading in HEADINGS
        }
        width = max(len(name) for section in rows.values() for name, _ in section)
        for heading, section in rows.items():
            for index, (name, text) in enumerate(section):
                summary = shorten(text, formatter.width - width - 11, placeholder=" ...")
                formatter.write(f"{'' if index else heading:8} {name:{width}}  {summary}\n")
        names = f"Advanced {' '.join(advanced)}"
        for line in wrap(names, formatter.width, subsequent_indent="  ", break_on_hyphens=False):
            formatter.write(f"{line}\n")
        formatter.write(f"{ctx.command_path} {HELP_ALL} explains all options and the exit codes.\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = self._sections(ctx)
        for heading in sorted(sections, key=lambda heading: heading == "Options"):  # options without a heading go last
            with formatter.section(heading):
                formatter.write_dl(sections[heading])

    def _sections(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Return the arguments and options by help heading, each as (names, help text)."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{heading: [] for heading in HEADINGS}}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            record = param.get_help_record(ctx)
            if record:
                sections.setdefault(heading, []).append(record)
        return {heading: rows for heading, rows in sections.items() if rows}


class LazyCommands(TyperGroup):
    """The group of all commands. It imports a command's module only when the command is used."""

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            self.commands: Any = dict.fromkeys(COMMANDS)  # typer takes its "did you mean" suggestions from these names
            return None
        command = _load_command(name)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        single = typer.Typer(**TYPER_DEFAULTS)
        single.command(name, cls=GroupedCommand)(command)
        return typer.main.get_command(single)

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write the list of commands: one line per command, with the first sentence of its docstring.

        The method of the base class would build the options of every command, which needs many more imports.
        """
        width = formatter.width - 6 - max(map(len, COMMANDS))
        rows = []
        for name in COMMANDS:
            command = _load_command(name)
            text = str(command.info.help if isinstance(command, typer.Typer) else command.__doc__)
            rows.append((name, shorten(_first_sentence(text), width, placeholder="...")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    """Return the first sentence of a help text or docstring."""
    paragraph = cleandoc(text).partition("\n\n")[0].replace("\n", " ")
    return f"{paragraph.partition('. ')[0].removesuffix('.')}."


def _first_name(names: str) -> str:
    """Return the first name of an option: `--json` for `--json, -j TEXT`."""
    return names.split(maxsplit=1)[0].rstrip(",")


def _first_clause(text: str) -> str:
    """Return the help text of an option up to its first full stop or semicolon."""
    return re.split(r"[.;] |\.$", text)[0]


app = typer.Typer(
    name="loadgen",
    cls=LazyCommands,
    help="An exact load tester for LLM inference servers: vLLM, LightLLM and Hugging Face TGI.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits it
    **TYPER_DEFAULTS | {"add_completion": True},
)


def main() -> None:
    """Run the command line. Expected errors are printed as a message and a hint, and set the exit code."""
    out, _ = protect()
    try:
        for word in sys.argv:
            _check_argument(word)
        try:
            app(prog_name="loadgen")
        finally:
            gc.freeze()  # saves 30 ms at exit, because the interpreter does not collect all imported modules
    except KeyboardInterrupt:
        print("loadgen: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as end:
        if not out.unfiltered.lost:
            raise
        sys.exit(_output_lost_code(out.unfiltered, end.code))
    except Exception as raised:
        error = _open_files_error(_disk_full_error(raised))
        code = _exit_code(error)
        if code is None:
            raise
        for line in getattr(error, "log_tail", "").splitlines():
            print(f"  | {line}", file=sys.stderr)
        print(f"loadgen: {error}", file=sys.stderr)
        hint = getattr(error, "hint", "")
        if hint:
            print(f"  {hint}", file=sys.stderr)
        sys.exit(code)


def _check_argument(word: str) -> None:
    """Raise PlanError for a command-line argument that Python could not decode."""
    if not re.search("[\ud800-\udfff]", word):
        return
    try:
        text = os.fsencode(word).decode()
    except UnicodeDecodeError:
        raise PlanError(f"not UTF-8: {word!r}", "Write the names of files and folders in UTF-8.") from None
    raise PlanError(
        f"{text!a}: the locale of this terminal is not UTF-8, so only ASCII letters can be used",
        "Set LC_ALL=C.UTF-8, or PYTHONUTF8=1.",
    )


def _output_lost_code(stream: TolerantStream, code: str | int | None) -> str | int | None:
    """Report that standard output could not be written, and return the exit code.

    Return 2 if the lost text was the only result of a command that succeeded. Otherwise return `code` unchanged.
    """
    assert stream.error is not None
    print(f"loadgen: cannot write standard output: {stream.error.strerror}", file=sys.stderr)
    if stream.results_folder is not None:
        print(f"  The run and its results are in {stream.results_folder}.", file=sys.stderr)
    return EXIT_USAGE if stream.needed and code in (None, EXIT_OK) else code


def _disk_full_error(error: Exception) -> Exception:
    """Return an OutputError if the error means that the disk or a quota is full. Return other errors unchanged."""
    if not isinstance(error, OSError) or error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return error
    file = error.filename or "a file"
    hint = "Free some disk space, also in the temporary folder, and try again."
    return OutputError(f"cannot write {file}: {error.strerror}", hint)


def _open_files_error(error: Exception) -> Exception:
    """Return a ClientLimitError if the limit on open files was reached. Return other errors unchanged."""
    if not isinstance(error, OSError) or error.errno not in {errno.EMFILE, errno.ENFILE}:
        return error
    from loadgen.servers.errors import ClientLimitError

    where = "process" if error.errno == errno.EMFILE else "machine"
    return ClientLimitError(
        f"this {where} cannot open more files: {error.strerror}", "Raise the limit: ulimit -n 65536"
    )


def _option_values(args: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (option, value) for each argument, as if every argument were an option.

    Both `--n=5` and `--n 5` yield `("--n", "5")`.
    """
    for word, following in zip(args, [*args[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        yield option, value if equals else following


def _load_command(name: str) -> Any:
    return getattr(import_module(COMMANDS[name]), name.replace("-", "_"))


def _exit_code(error: Exception) -> int | None:
    """Return the exit code for an expected error, or None for any other exception.

    Other exceptions are bugs in loadgen. Python prints their traceback.
    """
    from loadgen.analysis.run.errors import RunFileError
    from loadgen.errors import LoadgenError
    from loadgen.servers.errors import (
        ClientLimitError,
        EndpointError,
        HostsError,
        LimitError,
        SecretError,
        ServerError,
        VersionError,
    )
    from loadgen.servers.simulated import SimulatedError
    from loadgen.workloads.spec_syntax import WorkloadError

    usage = LoadgenError | RunFileError | WorkloadError | SimulatedError
    if isinstance(error, usage | EndpointError | HostsError | LimitError | SecretError | VersionError):
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
