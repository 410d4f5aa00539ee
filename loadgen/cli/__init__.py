"""The command line. It imports a command's module and builds the command's options only when the command is used."""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
from importlib import import_module
from textwrap import shorten
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from loadgen.cli.command_help import GroupedCommand, first_sentence
from loadgen.cli.examples import EXAMPLES
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

COMMAND_GROUPS = {
    "Measure": {
        "run": "loadgen.cli.run",
        "burst": "loadgen.cli.run",
        "sweep": "loadgen.cli.sweep",
        "matrix": "loadgen.cli.matrix",
        "ui": "loadgen.cli.ui",
        "worker": "loadgen.cli.run",
        "servers": "loadgen.cli.servers",
        "anonymise": "loadgen.cli.anonymise",
    },
    "Analyse": {
        "report": "loadgen.cli.report",
        "compare": "loadgen.cli.compare",
        "export": "loadgen.cli.report",
        "calibrate": "loadgen.cli.calibrate",
        "dissect": "loadgen.cli.dissect",
    },
    "Model without a server": {
        "simulate": "loadgen.cli.simulate",
        "limits": "loadgen.cli.limits",
        "hardware": "loadgen.cli.hardware",
        "twin": "loadgen.cli.twin",
        "plan-capacity": "loadgen.cli.capacity",
        "mock-server": "loadgen.cli.servers",
    },
}
"""Module of each command, by heading of `loadgen --help`. The module defines a function or a Typer group with the
command's name."""
COMMANDS = {name: module for group in COMMAND_GROUPS.values() for name, module in group.items()}
OTHER_NAMES = {"sim": "mock-server", "anonymize": "anonymise"}
"""Former names and other spellings of commands, which also work."""
PATH_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS})
"""Errors of a path that the user has to correct, or may not use."""
TYPER_DEFAULTS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


class LazyCommands(TyperGroup):
    """The group of all commands. It imports a command's module only when the command is used."""

    def list_commands(self, _ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: Any, name: str) -> Any:
        name = OTHER_NAMES.get(name, name)
        if name not in COMMANDS:
            self.commands: Any = dict.fromkeys(COMMANDS)  # typer takes its "did you mean" suggestions from these names
            return None
        command = _load_command(name)
        if isinstance(command, typer.Typer):
            for subcommand in command.registered_commands:
                subcommand.cls = GroupedCommand
            group = typer.main.get_command(command)
            group.epilog = f"Example: {EXAMPLES[name]}"
            return group
        single = typer.Typer(**TYPER_DEFAULTS)
        single.command(name, cls=GroupedCommand)(command)
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` name, and the remaining arguments.

        `help run` becomes `run --help`, and `help` alone shows the help of loadgen. For a command of another load
        tester, PlanError is raised with the equivalent loadgen command.
        """
        if args[0] == "help":
            args = [*args[1:], "--help"]
            if len(args) == 1:
                typer.echo(ctx.get_help())
                ctx.exit()
        if args[0] not in COMMANDS and args[0] not in OTHER_NAMES:
            from loadgen.cli.other_tools import check_command

            run = self.get_command(ctx, "run")
            check_command(run, run.get_params(ctx), args)
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write the list of commands: one line per command, with the first sentence of its help.

        The inherited method would build the options of every command. For this purpose, it would import many more
        modules.
        """
        width = formatter.width - 6 - max(map(len, COMMANDS))
        for heading, names in COMMAND_GROUPS.items():
            rows = []
            for name in names:
                command = _load_command(name)
                text = str(command.info.help if isinstance(command, typer.Typer) else command.__doc__)
                rows.append((f"{name:{max(map(len, COMMANDS))}}", shorten(first_sentence(text), width)))
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, _ctx: Any, formatter: Any) -> None:
        formatter.write(EPILOG)


EPILOG = """
Examples:
  loadgen run --url http://127.0.0.1:8000 --rate 5 --duration 30s
  loadgen run --url http://127.0.0.1:8000 --concurrency 8 --duration 60s
  loadgen compare runs/A runs/B

`loadgen COMMAND --help` explains a command. Documentation: docs/index.md of the
repository; docs/which-command.md has one line per task.
"""

app = typer.Typer(
    name="loadgen",
    cls=LazyCommands,
    help="An exact load tester for LLM inference servers: vLLM, SGLang, LightLLM and Hugging Face TGI.",
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
            app(_arguments(), prog_name="loadgen")
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
        error = _open_files_error(_file_error(raised))
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


def _arguments() -> list[str]:
    """Return the arguments of this process, in the form in which typer can parse them.

    Typer accepts one value per option, but `--at 10m date` has two. Such a pair is joined into one argument:
    `10m date`.
    """
    if "--at" not in sys.argv:
        return sys.argv[1:]
    from loadgen.timed_commands import join_arguments

    return join_arguments(sys.argv[1:])


def _check_argument(word: str) -> None:
    """Raise PlanError if Python could not decode this command-line argument."""
    if not re.search("[\ud800-\udfff]", word):
        return
    try:
        text = os.fsencode(word).decode()
    except UnicodeDecodeError:
        raise PlanError(
            f"the argument {word!r} is not UTF-8", "Write the names of files and folders in UTF-8."
        ) from None
    raise PlanError(
        f"{text!a}: the locale of this terminal is not UTF-8, so only ASCII letters can be used",
        "Set LC_ALL=C.UTF-8, or PYTHONUTF8=1.",
    )


def _output_lost_code(stream: TolerantStream, code: str | int | None) -> str | int | None:
    """Print an error message, because text could not be written to standard output. Return the new exit code of the
    command.

    `code` is the exit code so far. It is replaced by 2 if the command had succeeded and the lost text was its only
    result.
    """
    assert stream.error is not None
    print(f"loadgen: cannot write standard output: {stream.error.strerror}", file=sys.stderr)
    if stream.results_folder is not None:
        print(f"  The run and its results are in {stream.results_folder}.", file=sys.stderr)
    return EXIT_USAGE if stream.needed and code in (None, EXIT_OK) else code


def _file_error(error: Exception) -> Exception:
    """Return an error with a clear message if `error` says that a file or path cannot be used.

    There are two such errors:

    - A file cannot be written because there is no space, for example because the disk is full.
    - A path cannot be used, for example because it is too long or the user lacks the permission.

    Any other exception is returned unchanged.
    """
    if not isinstance(error, OSError):
        return error
    from loadgen.servers.backends.error_messages import one_line

    file = one_line(error.filename) if isinstance(error.filename, str) else ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        hint = "Free some disk space, also in the temporary folder, and try again."
        return OutputError(f"cannot write {file or 'a file'}: {error.strerror}", hint)
    if file and error.errno in PATH_ERRORS:
        return PlanError(f"cannot use {file}: {error.strerror}", "Check the path, and who may read and write it.")
    return error


def _open_files_error(error: Exception) -> Exception:
    """Return a ClientLimitError if the limit on open files was reached. Return other errors unchanged."""
    if not isinstance(error, OSError) or error.errno not in {errno.EMFILE, errno.ENFILE}:
        return error
    from loadgen.servers.errors import ClientLimitError

    where = "process" if error.errno == errno.EMFILE else "machine"
    return ClientLimitError(
        f"this {where} cannot open more files: {error.strerror}", "Raise the limit: ulimit -n 65536"
    )


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
