"""Functions that the commands of the hardware model share, for example to check options and to print results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.errors import PlanError
from loadgen.results import write_text

if TYPE_CHECKING:
    from typer import Context

    from loadgen.analysis.report import Document


INFERENCE = "Inference"
TRAINING = "Training"
"""Headings of the help above the options that apply to only one purpose."""


def check_purpose(context: Context, purpose: str) -> None:
    """Raise PlanError if the user gave an option that the command would ignore, because it does not apply to `purpose`.

    `purpose` is `inference` or `training`. In the help, some options are listed under the heading of one purpose. They
    apply only to this purpose.
    """
    other = TRAINING if purpose == "inference" else INFERENCE
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name) if parameter.name else None
        if source is not None and source.name == "COMMANDLINE" and getattr(parameter, "rich_help_panel", None) == other:
            option = parameter.opts[0]
            raise PlanError(
                f"{option} applies to {other.lower()} only, and this command computes {purpose}",
                f"Leave {option} out, or add --for {other.lower()}.",
            )


@contextmanager
def usage_errors() -> Iterator[None]:
    """Return a context manager that turns a HardwareError in its block into a PlanError, which is a usage error."""
    from loadgen.servers.hardware import HardwareError

    try:
        yield
    except HardwareError as error:
        raise PlanError(str(error)) from None


def print_result(
    result: Any, text: Callable[[], str], document: Callable[[], Document], page: Path | None, as_json: bool
) -> None:
    """Print the result as JSON or text, and write the page if requested.

    `text` and `document` return the text and the page.
    """
    if page is not None:
        from loadgen.analysis.report.page import render

        write_text(page, render(document()), "Name another file with --page.")
    if as_json:
        from msgspec import json

        print(json.format(json.encode(result)).decode())
        return
    print(text())
    if page is not None:
        print(f"\nPage: {page}")
