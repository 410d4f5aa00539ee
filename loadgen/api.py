"""Joins the parts into a run, and computes nothing: which server, its facts, the prompts, the workers, the Run."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from loadgen import calibration, host
from loadgen.load import SESSION_TOKENS, Load, bytes_of, load_of, longest_of, longest_prompt_of, part_of
from loadgen.plan import Plan

if TYPE_CHECKING:
    from loadgen.asking import Asked
    from loadgen.engine.counts import Counts
    from loadgen.engine.sampler import Sampler
    from loadgen.engine.worker import Share
    from loadgen.runfile import Footer, Header
    from servers.kinds.base import Dialect, ServerFacts
    from workloads.request import Request

Dealt = TypeVar("Dealt")
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


def run(
    plan: Plan,
    folder: Path,
    *,
    command: list[str],
    say: Say,
    on_progress: OnProgress,
    launch: Mapping[str, Any] | None = None,
) -> Footer:
    """Run the plan and write `folder/run.jsonl`; the first line that `say` gets names the server.
    `launch` is what is known of how the server was started.

    Raises LoadgenError, servers.errors.ServerError or workloads.prompts.PromptError before anything is sent.
    """
    from loadgen.engine import coordinator

    with prepared(plan, folder, say) as (shares, header):
        sampler = sampler_of(plan, header)
        host.make_folder(folder, bytes_of(plan, load_of(plan)))
        header.command = command
        header.server |= {"launch": dict(launch)} if launch else {}
        header.client["calibration"] = calibration.recall(header.host, say)
        return coordinator.run(shares, header, folder, on_progress, sampler)


@contextlib.contextmanager
def prepared(plan: Plan, folder: Path, say: Say) -> Iterator[tuple[list[Share], Header]]:
    """Everything that is known before the first connection is opened: each worker's share, and the Run's header."""
    from servers.find import dialect_on, of_version

    access = _access(plan)
    dialect = dialect_on(plan.server, plan.endpoint)
    load = load_of(plan)
    host.allow_open_files(-(-load.in_flight // plan.workers))
    with _server(plan, load, access, say) as found:
        facts = replace(found, model=plan.model or found.model)
        dialect = of_version(dialect, facts, say, force=plan.force)
        asked = _asked(plan, load, facts, dialect, access)
        say(f"{asked.what} ({asked.how}) for {facts.model}")
        yield _shares(plan, load, folder, facts, dialect, asked, access), _header(plan, facts, dialect, asked)


def _access(plan: Plan) -> Access:
    from servers.wire.connection import tls_context

    return Access(os.environ.get(plan.api_key_env) or None, tls_context(plan.ca_file, plan.insecure))


def sampler_of(plan: Plan, header: Header) -> Sampler:
    """What reads the server, the GPUs and the host beside the load. Raises PlanError."""
    from loadgen.engine import sources

    access = _access(plan)
    return sources.sampler_of(plan, header.server, load_of(plan).due_ns, api_key=access.api_key, verify=access.tls)


@contextlib.contextmanager
def _server(plan: Plan, load: Load, access: Access, say: Say) -> Iterator[ServerFacts]:
    """The server that answers, held against the plan; the built-in simulated one lives as long as this block."""
    from servers.find import check_limits, resolve

    longest = [longest_prompt_of(plan), longest_of(plan.output_tokens)]
    facts = resolve(plan.server, plan.url, os.environ, real=plan.real, api_key=access.api_key, verify=access.tls)
    if facts is None:
        with _simulated(plan, load, max(SESSION_TOKENS if plan.of_sessions else 4096, sum(longest)), say) as facts:
            yield facts
        return
    title = f"SIMULATED {facts.name} (clock x{facts.speed:g})" if facts.simulated else f"{facts.name} {facts.version}"
    say(f"{title} at {facts.url}: {_words(plan)}")
    check_limits(facts, load.at_once, *longest)
    yield facts


@contextlib.contextmanager
def _simulated(plan: Plan, load: Load, max_model_len: int, say: Say) -> Iterator[ServerFacts]:
    say(f"SIMULATED {plan.server} (none runs here, --url names one; clock x{plan.speed:g}): {_words(plan)}")
    from servers.find import probe
    from servers.simulated.config import SimulatedConfig
    from servers.simulated.server import spawn_process

    host.allow_open_files(load.in_flight)  # the child inherits the limit
    config = SimulatedConfig(
        server=plan.server,
        clock="batching",
        speed=plan.speed,
        max_concurrent_requests=load.in_flight,
        max_model_len=max_model_len,
        seed=plan.seed,
    )
    with spawn_process(config) as (url, pid):
        yield replace(probe(url, plan.server), pids=(pid,))


def _words(plan: Plan) -> str:
    """The plan in one line."""
    how_many = "" if plan.n is None else f"{plan.n} {'sessions' if plan.of_sessions else 'requests'}, "
    how_long = "" if plan.duration_s is None else f" for {plan.duration_s:g} s"
    when = "all at once" if plan.arrivals == "burst" else plan.arrivals
    tokens_in, tokens_out = plan.lengths
    return f"{how_many}{when}{how_long}, {tokens_in} tokens in, {tokens_out} out"


def _asked(plan: Plan, load: Load, facts: ServerFacts, dialect: Dialect, access: Access) -> Asked:
    from loadgen.asking import asked_of
    from servers.count import connect

    with connect(facts, dialect.endpoint, api_key=access.api_key, verify=access.tls) as server:
        return asked_of(plan, load, dialect, server)


def _shares(
    plan: Plan, load: Load, folder: Path, facts: ServerFacts, dialect: Dialect, asked: Asked, access: Access
) -> list[Share]:
    """Requests, or whole sessions, are dealt to the workers in turn, so that each has the same mix."""
    from loadgen.engine.driver import Limits
    from loadgen.engine.worker import Share
    from servers.wire.connection import target_of

    target = target_of(facts.url, access.tls)
    workers = plan.workers
    return [
        Share(
            worker=worker,
            requests=partial(_requests, asked, worker, workers),
            conversations=asked.conversations and partial(_dealt, asked.conversations, worker, workers),
            due_ns=None if load.due_ns is None else load.due_ns[worker::workers],
            clients=part_of(load.clients, worker, workers),
            think_ns=load.think_ns,
            until_ns=load.until_ns,
            warmup=asked.warmup[worker::workers],
            spare=part_of(load.spare, worker, workers),
            limits=Limits(plan.timeout_s, part_of(load.in_flight, worker, workers)),
            target=target,
            dialect=dialect,
            model=facts.model,
            headers=access.headers,
            kernel_stamps=plan.stamps == "kernel",
            part=folder / f"part-{worker}.jsonl",
        )
        for worker in range(workers)
    ]


def _requests(asked: Asked, worker: int, workers: int) -> Iterator[Request]:
    if asked.conversations is None:
        return _dealt(asked.requests, worker, workers)
    return chain.from_iterable(session.planned() for session in _dealt(asked.conversations, worker, workers))


def _dealt(draw: Callable[[], Iterator[Dealt]], worker: int, workers: int) -> Iterator[Dealt]:
    return islice(draw(), worker, None, workers)


def _header(plan: Plan, facts: ServerFacts, dialect: Dialect, asked: Asked) -> Header:
    from loadgen.runfile import Header

    why = dialect.misleads(facts.version)  # who did not force it did not get here
    return Header(
        version=version("llm-loadgen"),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        start_ns=0,
        plan=plan.model_dump(mode="json") | {"endpoint": dialect.endpoint},
        server={name: getattr(facts, name) for name in type(facts).__slots__},
        host=host.facts(),
        client={"prompts": asked.how, **({"forced": why} if why else {})},
    )
