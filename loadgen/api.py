"""Joins the parts into a run, and computes nothing: which server, its facts, the prompts, the workers, the Run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.errors import PlanError
from loadgen.host import allow_open_files, make_folder
from loadgen.host import facts as host_facts
from loadgen.plan import Plan

if TYPE_CHECKING:
    from loadgen.driver import Progress
    from loadgen.runfile import Footer
    from servers.dialects.base import Dialect
    from servers.probe import ServerFacts
    from workloads.request import Request


def default_folder(plan: Plan) -> Path:
    """runs/<UTC time>-<server>-<label>."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{plan.server}-{plan.label}"


def burst(
    plan: Plan,
    folder: Path,
    *,
    command: list[str],
    say: Callable[[str], None],
    on_progress: Callable[[str, Progress], None],
) -> Footer:
    """Run the plan and write `folder/run.jsonl`. `say` gets a line per step.

    Raises LoadgenError, servers.errors.ServerError or workloads.prompts.PromptError before anything is sent.
    """
    dialect = _dialect(plan)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_server(plan, say))
        make_folder(folder, plan)
        allow_open_files(-(-plan.n // plan.workers))
        facts = _probe(plan, url)
        requests, how = _requests(plan, url, dialect, facts)
        say(f"{plan.n} prompts of {plan.input_tokens} tokens ({how}), {plan.output_tokens} tokens to generate each")
        return _drive(plan, folder, url, dialect, facts, requests, how, command, on_progress)
