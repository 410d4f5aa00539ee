"""Joins the parts into a run, and computes nothing: which server, its facts, the prompts, the workers, the Run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen import host
from loadgen.errors import PlanError
from loadgen.plan import Plan
from servers.resolve import resolve

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
    """Run the plan and write `folder/run.jsonl`. `say` gets a line per step, the server's name in the first.

    Raises LoadgenError, servers.errors.ServerError or workloads.prompts.PromptError before anything is sent.
    """
    with _server(plan, say) as url:
        host.make_folder(folder, plan)
        host.allow_open_files(-(-plan.n // plan.workers))
        dialect, facts = _probe(plan, url)
        requests, how = _requests(plan, url, dialect, facts)
        say(f"{facts.name} {facts.version}, model {facts.model}; {plan.n} prompts of {plan.input_tokens} tokens: {how}")
        return _drive(plan, folder, dialect, facts, requests, how, command, on_progress)


@contextlib.contextmanager
def _server(plan: Plan, say: Callable[[str], None]) -> Iterator[str]:
    """The URL that answers; the built-in simulated server lives as long as this block."""
    asked = f"{plan.n} requests at once, {plan.input_tokens} tokens in, {plan.output_tokens} out"
    url = resolve(plan.server, plan.url, os.environ, real=plan.real)
    if url is not None:
        say(f"{plan.server} at {url}: {asked}")
        yield url
        return
    say(f"SIMULATED {plan.server} (none answers on its port; --url names one), clock x{plan.speed:g}: {asked}")
    from servers.simulated.config import SimulatedConfig
    from servers.simulated.server import spawn

    host.allow_open_files(plan.n)  # the child inherits the limit
    config = SimulatedConfig(
        server=plan.server,
        clock="batching",
        speed=plan.speed,
        max_concurrent_requests=plan.n,
        max_model_len=max(4096, plan.input_tokens + plan.output_tokens),
        seed=plan.seed,
    )
    with spawn(config) as url:
        yield url
