"""Joins the parts into a run, and computes nothing: which server, its facts, the prompts, the workers, the Run."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen import host
from loadgen.errors import PlanError
from loadgen.plan import Plan

if TYPE_CHECKING:
    from loadgen.counts import Counts
    from loadgen.runfile import Footer, Header
    from loadgen.worker import Share
    from servers.dialects.base import Dialect
    from servers.probe import ServerFacts
    from workloads.prompts import Prompts

Say = Callable[[str], None]
"""Gets one line per step."""
OnProgress = Callable[[str, "Counts"], None]
"""Gets a phase and the counts, ten times a second."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to get at the server besides its address: never written to the Run."""

    api_key: str | None
    tls: ssl.SSLContext

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def default_folder(plan: Plan) -> Path:
    """runs/<UTC time>-<server>-<label>."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{plan.server}-{plan.label}"


def burst(plan: Plan, folder: Path, *, command: list[str], say: Say, on_progress: OnProgress) -> Footer:
    """Run the plan and write `folder/run.jsonl`; the first line that `say` gets names the server.

    Raises LoadgenError, servers.errors.ServerError or workloads.prompts.PromptError before anything is sent.
    """
    from loadgen.coordinator import run

    with prepared(plan, folder, say) as (shares, header):
        host.make_folder(folder, plan)
        header.command = command
        return run(shares, header, folder, on_progress)


@contextlib.contextmanager
def prepared(plan: Plan, folder: Path, say: Say) -> Iterator[tuple[list[Share], Header]]:
    """Everything that is known before the first connection is opened: each worker's share, and the Run's header."""
    from servers.connection import tls_context

    access = Access(os.environ.get(plan.api_key_env) or None, tls_context(plan.ca_file, plan.insecure))
    dialect = _dialect(plan)
    with _server(plan, access, say) as found:
        facts = replace(found, model=plan.model or found.model)
        _check(plan, facts)
        host.allow_open_files(-(-plan.n // plan.workers))
        prompts = _prompts(plan, facts, dialect, access)
        say(f"{plan.n} prompts of {plan.input_tokens} tokens ({prompts.how}) for {facts.model}")
        yield _shares(plan, folder, facts, dialect, prompts, access), _header(plan, facts, dialect, prompts)


@contextlib.contextmanager
def _server(plan: Plan, access: Access, say: Say) -> Iterator[ServerFacts]:
    """The server that answers; the built-in simulated one lives as long as this block."""
    from servers.resolve import resolve

    asked = f"{plan.n} requests at once, {plan.input_tokens} tokens in, {plan.output_tokens} out"
    facts = resolve(plan.server, plan.url, os.environ, real=plan.real, api_key=access.api_key, verify=access.tls)
    if facts is not None:
        title = (
            f"SIMULATED {facts.name} (clock x{facts.speed:g})" if facts.simulated else f"{facts.name} {facts.version}"
        )
        say(f"{title} at {facts.url}: {asked}")
        yield facts
        return
    say(f"SIMULATED {plan.server} (none runs here, --url names one; clock x{plan.speed:g}): {asked}")
    from servers.probe import probe
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
        yield probe(url, plan.server)


def _dialect(plan: Plan) -> Dialect:
    from servers.dialects import DIALECTS, NATIVE

    endpoint = plan.endpoint or NATIVE[plan.server]
    if (plan.server, endpoint) not in DIALECTS:
        has = ", ".join(name for server, name in DIALECTS if server == plan.server)
        raise PlanError(f"--endpoint {endpoint}: {plan.server} has no such endpoint", f"It has: {has}.")
    return DIALECTS[plan.server, endpoint]


def _check(plan: Plan, facts: ServerFacts) -> None:
    from servers.probe import check_limits

    check_limits(facts, plan.n, plan.input_tokens, plan.output_tokens)


def _prompts(plan: Plan, facts: ServerFacts, dialect: Dialect, access: Access) -> Prompts:
    from servers.tokenize import connect
    from workloads.prompts import make_prompts
    from workloads.tokenizer import load

    local = load(plan.tokenizer) if plan.tokenizer else None
    with connect(facts, dialect.endpoint, api_key=access.api_key, verify=access.tls) as server:
        return make_prompts(
            plan.n, plan.input_tokens, plan.seed, token_ids=dialect.token_ids, local=local, server=server
        )


def _shares(
    plan: Plan, folder: Path, facts: ServerFacts, dialect: Dialect, prompts: Prompts, access: Access
) -> list[Share]:
    """Requests are dealt to the workers in turn, so that each has the same mix."""
    from loadgen.driver import Limits
    from loadgen.worker import Share
    from servers.connection import target_of
    from workloads.request import Request

    drawn: Sequence[str | tuple[int, ...]] = prompts.prompts
    requests = [Request(index, prompt, plan.input_tokens, plan.output_tokens) for index, prompt in enumerate(drawn)]
    target = target_of(facts.url, access.tls)

    def share(worker: int) -> Share:
        dealt = requests[worker :: plan.workers]
        return Share(
            worker=worker,
            requests=lambda: iter(dealt),
            due_ns=[0] * len(dealt),
            clients=0,
            think_ns=0,
            until_ns=None,
            warmup=(),
            spare=len(dealt),
            limits=Limits(plan.timeout_s, len(dealt)),
            target=target,
            dialect=dialect,
            model=facts.model,
            headers=access.headers,
            kernel_stamps=plan.stamps == "kernel",
            part=folder / f"part-{worker}.jsonl",
        )

    return [share(worker) for worker in range(plan.workers)]


def _header(plan: Plan, facts: ServerFacts, dialect: Dialect, prompts: Prompts) -> Header:
    from loadgen.runfile import Header

    return Header(
        version=version("llm-loadgen"),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        start_ns=0,
        plan=plan.model_dump(mode="json") | {"endpoint": dialect.endpoint, "arrivals": "burst"},
        server={name: getattr(facts, name) for name in type(facts).__slots__},
        host=host.facts(),
        client={"prompts": prompts.how},
    )
