"""The help of a command: options under headings, placeholders, defaults and an example."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from inspect import cleandoc
from textwrap import shorten, wrap
from typing import Any, cast

import typer
from typer.core import TyperCommand

from loadgen.cli.examples import EXAMPLES
from loadgen.errors import PlanError

SEPARATOR = "\0--"
"""Replaces the `--` between the two sides of `compare`. The option parser would remove a plain `--`."""
HEADINGS = ("Load", "Server", "Prompts", "Output")
HELP_ALL = "--help-all"
SHORT_HELP_ABOVE = 24
"""Commands with more options print a short help for --help, and the complete help for --help-all."""
LOAD_COMMANDS = ("run", "burst", "sweep", "simulate")
"""Commands that translate options of other load testers."""
FORMS_DIFFER = frozenset(
    (
        "--endpoint",
        "--goodput",
        "--model",
        "--tokenizer",
        "--rate",
        "--concurrency",
        "-c",
        "--out",
        "-o",
        "--output",
        "-d",
    )
)
"""Options that other load testers have too, but with values in another format."""
REPLICA_COMMANDS = ("burst", "run", "sweep")
"""Commands that take several replicas of a server, each with its own --url."""
SIMILARITY = 0.7
"""Minimum similarity, from 0 to 1, of an unknown option and an option that an error message suggests."""
OTHER_NAMES = {"--assert": "--objective", "--objective": "--assert"}
"""Options of one command by the name that the same option has in other commands."""
PLACEHOLDERS = {"<(int|float)( range)?>": "N", "<str>": "TEXT", "<path>": "PATH", r"^\[plan\]": "[PLAN]"}
"""Placeholders of option values in the help, by regular expressions for typer's type names."""


class GroupedCommand(TyperCommand):
    """A command whose help groups options under headings.

    If the user types options of another load tester, the command raises an error with the equivalent loadgen command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command.

        Raises PlanError for options of other load testers, and for several different values of --url.
        """
        if self.name == "compare":
            args = [SEPARATOR if word == "--" else word for word in args]
        urls = _values_of(args, "--url")
        if len(urls) > 1 and self.name not in REPLICA_COMMANDS:
            raise PlanError(
                f"--url is given {len(urls)} times, but loadgen {self.name} takes one server",
                "Name one URL. Several replicas at once are measured by loadgen burst, run and sweep.",
            )
        if self.name in LOAD_COMMANDS and not {"-h", "--help", HELP_ALL} & {*args}:
            params = self.get_params(ctx)
            if _may_be_foreign(args, {name for param in params for name in (*param.opts, *param.secondary_opts)}):
                from loadgen.cli.other_tools import check_words  # takes some milliseconds

                check_words(self, params, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if isinstance(getattr(error, "possibilities", None), list):
                self._correct_suggestions(ctx, error)
            raise

    def _correct_suggestions(self, ctx: Any, error: Any) -> None:
        """Change the options that the message of `error` suggests for an unknown option.

        If this command has an option with the same meaning (OTHER_NAMES), only this option is suggested. Otherwise
        suggestions that are not similar to the unknown option are removed.
        """
        same = OTHER_NAMES.get(error.option_name)
        if any(same in param.opts for param in self.get_params(ctx)):
            error.possibilities = [same]
        else:
            _drop_dissimilar(error)

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

        A command has a short help if it has more than SHORT_HELP_ABOVE options and some of them are advanced.
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
        """Write the help of the command: the short help if the command has one, unless the user asks for `--help-all`.

        The short help explains each option in one line. For advanced options, it lists only the names. It leaves out
        advanced options that need another option. For example, --bind needs --distributed.
        """
        if not self._has_short_help() or HELP_ALL in ctx.meta:
            super().format_help(ctx, formatter)
            return
        self.format_usage(ctx, formatter)
        formatter.write(f"{first_sentence(self.help or '')}\n")
        sections = self._sections(ctx)
        # Options that only complete another option, such as --bind for --distributed, are left to --help-all.
        advanced = [_first_name(names) for names, text in sections["Advanced"] if not text.startswith("With --")]
        rows = {
            heading: [(_short_names(names), _first_clause(text)) for names, text in section]
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
        if self.name in EXAMPLES:
            formatter.write(f"Example: {EXAMPLES[self.name]}\n")
        formatter.write(f"{ctx.command_path} {HELP_ALL} explains all options and the exit codes.\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = self._sections(ctx)
        for heading in sorted(sections, key=lambda heading: heading == "Options"):  # options without a heading go last
            with formatter.section(heading):
                formatter.write_dl(sections[heading])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        groups = ctx.command_path.split()[1:-1]
        write_example(" ".join([*groups, self.name or ""]), formatter)

    def _sections(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Return the arguments and options by help heading, each as (names, help text)."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{heading: [] for heading in HEADINGS}}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            record = param.get_help_record(ctx)
            if record:
                sections.setdefault(heading, []).append((_with_placeholder(record[0]), _with_unit(param, record[1])))
        return {heading: rows for heading, rows in sections.items() if rows}


def write_example(name: str, formatter: Any) -> None:
    """Write the example of a command, such as `hardware bounds`, after its help.

    Nothing is written for a command without an example.
    """
    if name in EXAMPLES:
        formatter.write(f"\nExample: {EXAMPLES[name]}\n")


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text or docstring."""
    paragraph = cleandoc(text).partition("\n\n")[0].replace("\n", " ")
    return f"{paragraph.partition('. ')[0].removesuffix('.')}."


def _values_of(args: Sequence[str], option: str) -> set[str]:
    """Return the distinct values of an option. Both forms are recognised: `--url=X` and `--url X`."""
    pairs = zip(args, [*args[1:], ""], strict=False)
    return {
        value if equals else following
        for (name, equals, value), following in ((word.partition("="), following) for word, following in pairs)
        if name == option
    }


def _may_be_foreign(args: Sequence[str], known: set[str]) -> bool:
    """Return True if the arguments may contain options or URLs of other load testers.

    `known` contains the options of the loadgen command.
    """
    previous = ""
    for word in args:
        option, equals, value = word.partition("=")
        if word.startswith("-") and option not in known:
            return True
        is_argument = not (word.startswith("-") or previous.startswith("-"))
        pair = (option, value) if equals and word.startswith("-") else (previous, word)
        if (is_argument and ":" in word) or (
            pair[0] in FORMS_DIFFER and re.search(r"^/|^@|[,:=]|^\d+/|^json|^csv", pair[1])
        ):
            return True
        previous = word
    return False


def _drop_dissimilar(error: Any) -> None:
    """Remove suggestions from the error for an unknown option if they are not similar to this option."""
    from difflib import SequenceMatcher  # takes a millisecond

    name = str(error.option_name).lstrip("-")
    error.possibilities = [
        option
        for option in error.possibilities
        if SequenceMatcher(None, name, option.lstrip("-")).ratio() >= SIMILARITY
    ]


def _with_placeholder(names: str) -> str:
    """Return the names of an option with a placeholder for its value.

    The placeholder, such as `TEXT`, replaces typer's type name, such as `<str>`.
    """
    for pattern, placeholder in PLACEHOLDERS.items():
        names = re.sub(pattern, placeholder, names)
    return names


def _with_unit(param: Any, text: str) -> str:
    """Return the help text of an option, with its default written as users write it.

    For example, the default `600.0` becomes `10m`, and the default `1.0` becomes `1`.
    """
    text = re.sub(r"(?<=\[default: )(\d+)\.0(?=[\];])", r"\1", text)
    parser = getattr(getattr(param.type, "func", None), "__name__", "")
    if parser not in DEFAULT_FORMATS:
        return text
    return re.sub(r"(?<=\[default: )[\d.]+", lambda match: DEFAULT_FORMATS[parser](float(match[0])), text)


def _format_seconds(value_s: float) -> str:
    if value_s < 1:
        return f"{value_s * 1000:g}ms"
    return f"{value_s / 60:g}m" if value_s % 60 == 0 else f"{value_s:g}s"


DEFAULT_FORMATS: dict[str, Callable[[float], str]] = {
    "seconds": _format_seconds,
    "fraction": lambda value: f"{value:.4%}".rstrip("0%").rstrip(".") + "%",
}
"""Functions that format the default of an option, by the name of the function that parses its value."""


def _first_name(names: str) -> str:
    """Return the first long name of an option: `--json` for `-j, --json TEXT`."""
    words = re.findall(r"--[\w-]+", names)
    return words[0] if words else names


def _short_names(names: str) -> str:
    """Return the names of an option that the short help shows: the short names, and the first long name.

    A short name is one dash and one letter, such as `-n`. A long name begins with two dashes, such as `--n`. `names`
    contains all names of the option and its placeholder. For example, `-n, --n, --requests N` becomes `-n, --n N`.
    """
    short = re.findall(r"(?<![\w-])-\w(?!\w)", names)
    placeholder = names.rpartition(_all_names(names)[-1])[2] if _all_names(names) else ""
    return ", ".join([*short, _first_name(names)]) + ("" if " / " in names else placeholder)


def _all_names(names: str) -> list[str]:
    return re.findall(r"--?[\w-]+", names)


def _first_clause(text: str) -> str:
    """Return an option's help text up to the first full stop or semicolon, followed by the option's default."""
    clause = re.split(r"[.;] |\.$", text)[0]
    default = re.search(r"\[default: (.*?)[\];]", text)
    return clause if default is None or "default" in clause else f"{clause} (default {default[1]})"
