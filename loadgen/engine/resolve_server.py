"""The server of a Plan: how to get at it, which one answers, and how it is spoken to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from string import Template
from typing import TYPE_CHECKING

from msgspec import structs

from loadgen import machine as host
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.auth import (
    HEADER,
    Access,
    bearer_header,
    normalise_url,
    read_secret,
    redact_header,
    register_secret,
    tls_context,
)
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import round_up_to_pieces
from loadgen.servers.errors import SecretError
from loadgen.workloads import arrival_processes as processes
from loadgen.workloads import arrivals, lengths, workload
from loadgen.workloads.sessions import MultiTurn

if TYPE_CHECKING:
    from loadgen.servers.backends.base import ServerFacts
    from loadgen.servers.backends.dialect import Dialect

TURN_TOKENS = 16
"""What a line break or a chat template may add to each thing said."""

DRAWN_BEFORE = 10_000
"""Output lengths that are looked at before a run, of those that its requests will ask for."""
SHOWN_LENGTHS = 3
"""Output lengths that a line names before it shortens the list."""

Say = Callable[[str], None]
"""Gets one line per step."""


def access_for(plan: Plan) -> Access:
    """The plan's headers and the API key, with what environment variables hold, and how certificates are checked.
    Raises SecretError, and PlanError where the plan names a variable that is not set."""
    headers = dict(_filled(plan.header))
    key = read_secret(plan.api_key_env)
    if not key and plan.api_key_env != Plan.api_key_env:
        name = plan.api_key_env
        raise PlanError(f"--api-key-env {name}: the variable is empty or not set", f"Set it: export {name}=...")
    if "authorization" not in {name.lower() for name in headers}:
        headers |= bearer_header(key)
    tls = tls_context(plan.ca_file, plan.insecure) if plan.ca_file or plan.insecure else None
    return Access(headers, tls)


def _filled(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, written = line.partition(":")
        try:
            value = Template(written).substitute({key: held.strip() for key, held in os.environ.items()}).strip()
        except KeyError as error:
            variable = error.args[0]
            hint = f"Set the environment variable {variable}."
            raise PlanError(f"--header {name}: ${variable} is not set", hint) from None
        except ValueError:
            raise PlanError(f"--header {name}: a $ without a name", "Write $$ for a dollar sign.") from None
        if not HEADER.fullmatch(f"{name}: {value}"):
            what = "a variable in it holds several lines, or more than Latin letters"
            raise PlanError(f"--header {name}: {what}", "Set it to the value alone.")
        if redact_header(known := f"{name}{written}: {value}") != known:  # by the words of either, or of the variable
            register_secret(value, source=f"--header {name}")
        yield name, value


def with_detected_server(plan: Plan) -> Plan:
    """The plan with the name of its server; who answers at its URL is asked where it has none. Raises
    loadgen.servers.errors.ServerError."""
    if plan.server or not plan.url:
        return plan
    from loadgen.servers.discovery import probe

    result = probe(plan.url, model=plan.model, access=access_for(plan))
    return plan.replaced(server=result.name)


def dialect_for(plan: Plan, facts: ServerFacts, access: Access, say: Say, endpoint: str | None = None) -> Dialect:
    """How the server is spoken to on an endpoint, by default the plan's: as its version does, without what it refuses.
    Raises EndpointError, VersionError and UnauthorizedError."""
    from loadgen.servers.discovery import dialect_for_version, drop_refused_fields, endpoint_dialect

    result = endpoint_dialect(plan.server, endpoint or plan.endpoint or facts.endpoint)
    result = dialect_for_version(result, facts, say, force=plan.force)
    return drop_refused_fields(result, facts, say, timeout_s=plan.timeout_s, access=access)


def max_length(tokens: int | str) -> int:
    """The longest that a plan's lengths can be where that is known, else 1: it cannot be checked beforehand."""
    named = lengths.parse_outputs(str(tokens)).lengths
    if isinstance(named, lengths.Fixed):
        return named.length
    return named.high if isinstance(named, lengths.Uniform) else 1


def longest_prompt_of(plan: Plan) -> int:
    """The longest prompt, as far as it is known: a session's last turn holds all that was said before."""
    requested, answered = max_length(plan.input_tokens), max_length(plan.output_tokens)
    named = workload.parse(plan.workload)
    if not isinstance(named, MultiTurn):
        return requested
    turns = named.turns
    return 1 if turns is None else turns * (requested + TURN_TOKENS) + (turns - 1) * (answered + TURN_TOKENS)


def simulated_name(facts: ServerFacts) -> str:
    """Return what a line calls a simulated server: its mark, its kind and the speed of its clock."""
    speed = "of unknown speed" if facts.speed is None else f"x{facts.speed:g}"
    return f"SIMULATED {facts.name} (clock {speed})"


def clock_speed(plan: Plan) -> float:
    """Return how many times faster than real time the clock of the plan's server runs: 1 for a real server.

    Nothing is started: the built-in simulated server would run at the plan's speed. Raises
    loadgen.servers.errors.ServerError.
    """
    from loadgen.servers.discovery import resolve

    facts = resolve(plan.server, _url_of(plan), os.environ, real=plan.real, model=plan.model, access=access_for(plan))
    return plan.speed if facts is None else facts.speed or 1.0


def _url_of(plan: Plan) -> str | None:
    """Return the URL that the plan or the environment names. Raises PlanError or SecretError for a wrong one."""
    variable = BACKENDS[plan.server].url_variable
    given = os.environ.get(variable)
    try:
        return plan.url or (None if given is None else normalise_url(given))
    except SecretError as error:
        raise SecretError(f"{variable}: {error}", error.hint) from None
    except ValueError as error:
        raise PlanError(f"{variable} {given}: {error}", "Mend it, or pass --url.") from None


def piece_advice(plan: Plan, facts: ServerFacts) -> str:
    """Say what becomes of output lengths that a server which generates in pieces cannot give; empty where it can give
    them all, or where they are not known before the run."""
    from loadgen.servers.discovery import fitting_output

    piece = facts.notes.get("prompt_piece_tokens", 0)
    if not piece:
        return ""
    drawn = {*islice(_requested_lengths(plan), min(plan.n or DRAWN_BEFORE, DRAWN_BEFORE))}
    others = {output: fitting_output(facts, prompt, output) for prompt, output in sorted(drawn, key=itemgetter(1))}
    changed = {output: becomes for output, becomes in others.items() if becomes != output}
    if not changed:
        return ""
    series = facts.version.partition(".")[0]
    what = f"{facts.title} {series}.x generates in pieces of {piece:,} tokens"
    shown = [f"{length:,} becomes {becomes:,}" for length, becomes in changed.items()]
    if len(shown) > SHOWN_LENGTHS:
        longest, becomes = [*changed.items()][-1]
        shown = [shown[0], f"and so on up to {longest:,}, which becomes {becomes:,}"]
    return f"{what}: {', '.join(shown)}. Ask for at most {piece:,}, or a multiple of it."


def _requested_lengths(plan: Plan) -> Iterator[tuple[int, int]]:
    """The prompt's and the output's tokens of each request, as far as they are known before a run. Of a prompt whose
    length is drawn only the longest is known, or nothing."""
    named = arrivals.parse(plan.arrivals)
    if isinstance(named, processes.Trace) and isinstance(workload.parse(plan.workload), workload.Synthetic):
        yield from ((entry.input_tokens, entry.output_tokens) for entry in named.entries())
        return
    outputs = lengths.parse_outputs(str(plan.output_tokens)).lengths
    if outputs is not None:
        prompt = longest_prompt_of(plan)
        yield from ((prompt, length) for length in outputs.tokens(plan.seed, "output"))


@contextlib.contextmanager
def server_for(
    plan: Plan, access: Access, say: Say, at_once: int, streams: int, tokens: int, about: str = ""
) -> Iterator[ServerFacts]:
    """The server that answers, held against the plan: `at_once` requests are certainly under way together. The built-in
    simulated one lives as long as this block, takes `streams` at a time and has room for `tokens` in each. `say` gets
    one line: who it is, and what is `about` to come. Raises loadgen.servers.errors.ServerError."""
    from loadgen.servers.discovery import check_limits, endpoint_dialect, exceeded_request_limit, probe, resolve

    url = _url_of(plan)
    dialect = endpoint_dialect(plan.server, plan.endpoint)
    answered = max_length(plan.output_tokens) if dialect.streams else 0
    longest = [longest_prompt_of(plan), answered]
    facts = resolve(plan.server, url, os.environ, real=plan.real, model=plan.model, access=access)
    if facts is not None:
        who = simulated_name(facts) if facts.simulated else f"{facts.name} {facts.version}"
        say(f"{who.strip()} at {facts.url}{about}")
        check_limits(facts, at_once, *longest, over_limit=plan.over_limit)
        if beyond := exceeded_request_limit(facts, at_once):
            say(f"sent on purpose (--over-limit): {beyond}")
        if advice := piece_advice(plan, facts):
            say(advice)
        yield facts
        return
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn_process

    say(f"SIMULATED {plan.server} (none runs here, --url names one; clock x{plan.speed:g}){about}")
    host.allow_open_files(streams)  # the child inherits the limit
    config = SimulatedConfig(
        server=plan.server,
        clock="batching",
        speed=plan.speed,
        max_concurrent_requests=streams,
        max_model_len=max(tokens, longest[0] + round_up_to_pieces(answered, dialect.max_piece_tokens)),
        seed=plan.seed,
    )
    with spawn_process(replace(config, model=plan.model or config.model)) as (url, pid):
        facts = probe(url, plan.server)
        if advice := piece_advice(plan, facts):
            say(advice)
        yield structs.replace(facts, pids=(pid,))
