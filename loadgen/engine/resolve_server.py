"""Resolves the server of a Plan: its credentials, its URL and version, and the API dialect that it supports."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from math import inf
from operator import itemgetter
from random import SystemRandom
from string import Template
from typing import TYPE_CHECKING

from msgspec import structs

from loadgen import machine
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.auth import (
    Access,
    TlsFiles,
    fill_fields,
    read_secret,
    redact_header,
    register_secret,
    tls_context,
)
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import azure_header, bearer_header, round_up_to_pieces
from loadgen.servers.errors import SecretError, UnreachableError, WrongServerError
from loadgen.servers.proxy import proxy_at
from loadgen.servers.server_url import describe_repair, has_fixed_address, parse_server_url, takes_azure_key
from loadgen.servers.target import address_text
from loadgen.workloads import arrival_processes, lengths, workload
from loadgen.workloads.http_headers import HEADER
from loadgen.workloads.request import Request
from loadgen.workloads.session_files import SessionFile
from loadgen.workloads.sessions import MultiTurn

if TYPE_CHECKING:
    from loadgen.servers.backends.base import ServerFacts
    from loadgen.servers.backends.dialect import Dialect

GENERIC = "openai"
"""Backend of servers that are known only by their OpenAI routes."""
TURN_TOKENS = 16
"""Maximum number of tokens that line breaks or a chat template add to each message of a session."""

MAX_CHECKED_LENGTHS = 10_000
"""Maximum number of requests whose output lengths are checked before a run."""
SIMULATED_SERVER = "vllm"
"""The server that is simulated if neither a server nor a URL is named."""
SIMULATED_GPUS = 4
"""Number of GPUs that the built-in simulated server models.

On 4 x H100 SXM, a burst of 1,000 requests of 512 + 128 tokens takes about 20 s on TGI, without speeding up the clock.
"""
MAX_RANDOM_SEED = 999_999_999
"""Largest random seed. Users may have to type a seed, so it has at most nine digits."""
EQUAL_FACTS = {
    "name": "backend",
    "version": "version",
    "model": "model",
    "simulated": "simulation",
    "api_path": "API path",
    "query": "query",
}
"""The facts that must be equal for all replicas of a server, with their names in messages."""
SHOWN_LENGTHS = 3
"""Maximum number of output lengths that a message lists before it is shortened."""

DETECTED_VALID_S = 5.0
"""Time in seconds for which the result of detecting a server is used once, so that its run need not probe it again."""
_detected: dict[tuple[str, str | None], tuple[float, ServerFacts]] = {}
"""Time (CLOCK_MONOTONIC) and facts of detected servers, by URL and model. An entry is removed when it is used."""

Say = Callable[[str], None]
"""Callback that prints one line per step."""


def access_for(plan: Plan, dialect: Dialect | None = None) -> Access:
    """Return the Access to the server of a plan: HTTP headers with the API key, TLS settings and the proxy.

    - For Azure OpenAI, the key is in Azure's header.
    - For any other server, the key is in the header that `dialect` requires. If `dialect` is None, the endpoint that
      the plan names determines the header (see `_key_headers`).
    - Headers of the plan (`--header`) are added, with environment variables filled in. They replace headers with the
      same name.

    Raises PlanError if a variable is not set, and SecretError for a secret that cannot be used.
    """
    key_headers = dialect.headers if dialect else _key_headers(plan)
    if takes_azure_key(plan.url or os.environ.get(BACKENDS[plan.server or GENERIC].url_variable, "")):
        key_headers = azure_header
    headers = dict(_parse_headers(plan.header))
    key = read_secret(plan.api_key_env)
    name = plan.api_key_env
    if not name:
        raise PlanError("--api-key-env names no variable", "Write, for example, --api-key-env OPENAI_API_KEY.")
    if not key and name != Plan.api_key_env:
        raise PlanError(f"--api-key-env {name}: the variable is empty or not set", f"Set it: export {name}=...")
    own = {name.lower() for name in headers}
    headers |= {name: value for name, value in key_headers(key).items() if name.lower() not in own}
    files = TlsFiles(plan.ca_file, plan.insecure, plan.cert, plan.key)
    tls = tls_context(*files) if files != TlsFiles() else None
    return Access(headers, tls, proxy_at(plan.proxy) if plan.proxy else None, files)


def _key_headers(plan: Plan) -> Callable[[str | None], dict[str, str]]:
    """Return a function that takes an API key and returns the request headers that contain the key.

    - For a plan without an endpoint, this is the header `Authorization: Bearer KEY`.
    - For a plan with an endpoint and a backend, these are the headers that this backend requires at the endpoint.
    - For a plan with an endpoint but without a backend, the function returns the headers that the endpoint usually
      requires and `Authorization: Bearer KEY`, because the backend may require either of them.
    """
    dialect = BACKENDS[plan.server or GENERIC].dialects.get(plan.endpoint or "")
    if dialect is None:
        return bearer_header
    headers = dialect.headers
    return headers if plan.server else lambda key: bearer_header(key) | headers(key)


def request_headers(plan: Plan, dialect: Dialect) -> dict[str, str]:
    """Return the headers of every request to the endpoint of `dialect`. Raises the errors that `access_for` raises."""
    return access_for(plan, dialect).headers


def _parse_headers(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each `--header`, with environment variables filled in.

    Raises PlanError if a variable is not set or a header is malformed.
    """
    for line in lines:
        name, _, template = line.partition(":")
        try:
            variables = {key: content.strip() for key, content in os.environ.items()}
            value = Template(template).substitute(variables).strip()
        except KeyError as error:
            variable = error.args[0]
            hint = f"Set the environment variable {variable}."
            raise PlanError(f"--header {name}: ${variable} is not set", hint) from None
        except ValueError:
            raise PlanError(
                f"--header {name}: no name of an environment variable follows the $", "Write $$ for a dollar sign."
            ) from None
        if not HEADER.fullmatch(f"{name}: {value}"):
            problem = "a variable in it holds several lines, or characters outside Latin-1"
            raise PlanError(f"--header {name}: {problem}", "Set the variable to the value alone.")
        # The header is secret if its name, its value or the name of a variable contains a word such as `token`.
        words = f"{name}{template}: {value}"
        if redact_header(words) != words:
            register_secret(value, source=f"--header {name}")
        yield name, value


def with_detected_server(plan: Plan, say: Say | None = None) -> Plan:
    """Return the plan with a normalised URL and with the name of its server's backend.

    If the URL is that of an endpoint, such as `.../v1/chat/completions`, the plan uses this endpoint. If the plan names
    no backend, the server at the URL is probed. With `--expect-replicas`, the function first waits until enough
    replicas answer. Raises loadgen.servers.errors.ServerError, and PlanError for URLs that cannot be used together.
    """
    if not plan.server and plan.simulated:
        return plan.replaced(server=SIMULATED_SERVER)
    if plan.more_urls and not plan.proxy:  # with a proxy, the addresses are those of the proxy's network
        _check_addresses(plan.urls, say)
    if plan.expect_replicas:
        _wait_for_replicas(plan, say or (lambda _: None))
    if not plan.url:
        return plan
    changes = _url_changes(plan, plan.url, "--url", say)
    plan = plan.replaced(**changes, more_urls=tuple(_replica_urls(plan, changes, say)))
    if plan.server:
        return plan
    from loadgen.servers.discovery import probe

    assert plan.url is not None
    result = probe(plan.url, model=plan.first_model, access=access_for(plan), say=say)
    _detected[plan.url, plan.first_model] = time.monotonic(), result
    return plan.replaced(server=result.name)


def _check_addresses(urls: Sequence[str], say: Say | None) -> None:
    """Raise PlanError if two of the URLs certainly lead to the same server.

    This is certain if both URLs have the same address and path, and the host of at least one of them is an IP address,
    `localhost` or a Unix socket. If both hosts are names, a gateway at this address may choose a different server for
    each name. In this case, `say` is called with a warning instead.
    """
    from loadgen.servers.replica_identity import find_places

    for (first, places), (second, other_places) in combinations([(url, find_places(url)) for url in urls], 2):
        common = sorted(address_text(address) for address, _, _ in places & other_places)
        if not common:
            continue
        if has_fixed_address(first) or has_fixed_address(second):
            raise PlanError(
                f"--url {first} and --url {second} lead to the same server, at {common[0]}", "Name each replica once."
            )
        if say:
            say(f"{first} and {second} have the same address, {common[0]}, and may be the same server")


def _wait_for_replicas(plan: Plan, say: Say) -> None:
    """Wait until the expected number of replicas answers.

    Raises UnreachableError if too few answer in time, and PlanError if the server has no URL.
    """
    from loadgen.servers.expected_replicas import wait_for_replicas

    urls = plan.urls or ((_url_of(plan) or "",) if plan.server else ())
    if not any(urls):
        raise PlanError("--expect-replicas: the server has no URL", "Name the replicas with --url.")
    wait_for_replicas(urls, plan.expect_replicas, plan.replica_header, plan.replicas_wait_s, access_for(plan), say)


def needs_seed(plan: Plan) -> bool:
    """Return True if the run may need a random seed, because the user states no seed and may measure a real server.

    The result is False if the plan requests a simulated server, which needs no random seed.
    """
    return plan.seed_choice == "fixed" and not plan.simulated


def with_seed(plan: Plan, say: Say | None = None) -> Plan:
    """Return the plan with the seed of its run. The seeds of repeats and of the steps of a sweep depend on this seed.

    A seed that the user states is kept. Otherwise, the seed depends on the server:

    - A real server gets a new random seed, because its prefix cache may hold the prompts of earlier runs.
    - A simulated server gets the default seed, so that the run can be reproduced.

    `say` is called with a line about a new random seed. Raises the errors that `server_for` raises, because the server
    must be found first.
    """
    if not needs_seed(plan):
        return plan
    facts = _find_server(plan, access_for(plan), say)
    if facts is None:
        return plan
    _detected[_url_of(plan) or "", plan.first_model] = time.monotonic(), facts
    plan = with_new_seed(plan, facts)
    if say and plan.seed_choice == "random":
        say(f"random seed; --seed {plan.seed} sends the same requests again")
    return plan


def with_new_seed(plan: Plan, facts: ServerFacts) -> Plan:
    """Return the plan with a new random seed if the user states no seed and the server is real.

    Otherwise, or if the seed of the plan is random already, return the plan unchanged.
    """
    if plan.seed_choice != "fixed" or facts.simulated:
        return plan
    return plan.replaced(seed=random_seed(), seed_choice="random")


def random_seed() -> int:
    """Return a new random seed, from 1 to MAX_RANDOM_SEED."""
    return SystemRandom().randint(1, MAX_RANDOM_SEED)


def command_with_seed(command: Sequence[str], plan: Plan) -> list[str]:
    """Return the words of a command line that repeats the run of a plan with the same seed.

    If loadgen chose the seed at random, `--seed` and the seed are appended to `command`. Otherwise the result equals
    `command`.
    """
    return [*command, "--seed", str(plan.seed)] if plan.seed_choice == "random" else [*command]


def _url_changes(plan: Plan, url: str, option: str, say: Say | None) -> dict[str, str | None]:
    """Parse a URL as the user wrote it, and return the resulting plan fields `url` and `endpoint`.

    If the URL had to be corrected, `say` is called with a line about the correction. `option` is the name of the option
    or environment variable that contains the URL.
    """
    address = parse_server_url(url)
    repair = describe_repair(url, address)
    if repair and say:
        say(f"{option} {repair}")
    return {"url": address.url, "endpoint": plan.endpoint or address.endpoint or None}


def _replica_urls(plan: Plan, first: dict[str, str | None], say: Say | None) -> Iterator[str]:
    """Yield the normalised URLs of all replicas but the first. `first` contains the URL and the endpoint of the first
    one.

    Raises PlanError in three cases:

    - A URL names a different endpoint than the first URL.
    - Two URLs are equal after they have been normalised.
    - The plan has a proxy, and some URLs begin with `http:` and some with `https:`.
    """
    known, endpoint = {first["url"]}, first["endpoint"]
    for url in plan.more_urls:
        changes = _url_changes(plan, url, "--url", say)
        if changes["endpoint"] not in (None, endpoint):
            raise PlanError(
                f"--url {url} names the endpoint {changes['endpoint']}, and --url {plan.url} names "
                f"{endpoint or 'none'}",
                "Give the base URL of each replica, and name the endpoint with --endpoint.",
            )
        if plan.proxy and url.startswith("https:") != str(plan.url).startswith("https:"):
            raise PlanError(
                f"--url {url}: with --proxy, all replicas need http or all need https", "Leave --proxy out."
            )
        if changes["url"] in known:
            raise PlanError(f"--url {url} is given twice in different forms", "Name each replica once.")
        known.add(changes["url"])
        assert changes["url"] is not None
        yield changes["url"]


def find_replicas(plan: Plan, first: ServerFacts, access: Access, say: Say) -> list[ServerFacts]:
    """Return the facts about every replica of the plan, beginning with `first`.

    `first` contains the facts about the first replica, which are already known. Raises WrongServerError if another
    replica differs from it in a fact of EQUAL_FACTS, such as the model. Raises the errors of
    `loadgen.servers.discovery.probe` if a replica does not answer.
    """
    from loadgen.servers.discovery import probe

    result = [first]
    for url in plan.more_urls:
        facts = probe(url, model=plan.first_model, access=access, say=say)
        for fact, title in EQUAL_FACTS.items():
            ours, theirs = getattr(first, fact), getattr(facts, fact)
            if ours != theirs:
                raise WrongServerError(
                    f"{facts.url} is no replica of {first.url}: its {title} is {theirs or 'none'}, not "
                    f"{ours or 'none'}",
                    "Replicas must run the same server. For different servers, make one run per server and compare "
                    "them: loadgen compare RUN RUN.",
                )
        result.append(facts)
    return result


def dialect_for(plan: Plan, facts: ServerFacts, say: Say, endpoint: str | None = None) -> Dialect:
    """Return the dialect (request and response format) for an endpoint of the server.

    `endpoint` is the name of the endpoint. By default, it is the endpoint that the plan names. If the plan names none,
    the native endpoint of the backend is tried first, and then the chat endpoint. The first one that accepts requests
    is used.

    The dialect matches the server's version, and leaves out the request fields that the server refuses. Raises
    EndpointError, NoEndpointError, RefusedModelError, VersionError or UnauthorizedError.
    """
    from loadgen.servers.discovery import check_endpoint, check_version, dialect_for_version
    from loadgen.servers.endpoint_probe import choose_endpoint

    check_endpoint(facts, endpoint or plan.endpoint)
    dialects = _possible_dialects(plan, facts, endpoint or plan.endpoint or facts.default_endpoint)
    result = dialects[0]
    if not plan.force:
        check_version(result, facts)
    if needs_test_request(result, facts):
        request = _test_request(plan, result)
        access = access_for(plan, result)
        result = choose_endpoint(dialects, facts, request, say, timeout_s=plan.timeout_s, access=access)
    if not plan.force:
        check_version(result, facts)
    return dialect_for_version(result, facts, say)


def check_models(plan: Plan, facts: ServerFacts, dialect: Dialect, say: Say) -> None:
    """Check that the server accepts every model if the requests are split over several (`--model a=70,b=30`).

    A model that the server does not list is tested with a request for one token. The first model needs no test, because
    it has been checked together with the server. Raises RefusedModelError for a model that the server refuses.
    """
    from loadgen.servers.discovery import listed_models
    from loadgen.servers.endpoint_probe import choose_endpoint

    if plan.model_mix is None:
        return
    access = access_for(plan, dialect)
    listed = listed_models(facts, access)
    for model in plan.model_mix.models[1:]:
        if model not in listed:
            other = structs.replace(facts, model=model, listed=False)
            choose_endpoint(
                [dialect], other, _test_request(plan, dialect), say, timeout_s=plan.timeout_s, access=access
            )


def _possible_dialects(plan: Plan, facts: ServerFacts, endpoint: str | None) -> list[Dialect]:
    """Return the dialects (request and response formats) that the server may accept, in the order to try them.

    Raises EndpointError if the backend does not have the endpoint.
    """
    from loadgen.servers.discovery import endpoint_dialect
    from loadgen.servers.endpoint_probe import relocated

    result = [relocated(endpoint_dialect(plan.server, endpoint), facts)]
    if plan.path:
        query = f"?{facts.query}" if facts.query and "?" not in plan.path else ""
        return [result[0].at(plan.path + query)]
    if endpoint is None and not result[0].chat and result[0].refusable_fields:
        result.append(relocated(endpoint_dialect(plan.server, "chat"), facts))
    if facts.name == GENERIC and facts.api_path:
        # A gateway without a list of models may have its routes directly below the base.
        below_base = structs.replace(facts, api_path="", query="")
        result += [relocated(dialect, below_base) for dialect in result]
    return result


def _test_request(plan: Plan, dialect: Dialect) -> Request:
    """Return the request that is sent before a run to test whether the server accepts the dialect.

    The request asks for one token. It includes the user's extra body fields, because a gateway may require them. Fields
    that set a minimum length are left out, because they would contradict the length of one token.
    """
    fields = {name: value for name, value in fill_fields(plan.extra_body).items() if not name.startswith("min_")}
    tokens = 1 if dialect.has_output_length else 0
    return Request(0, "Hello", 0, tokens, body=fields, ignore_eos=not plan.may_stop_early)


def has_exact_lengths(plan: Plan, dialect: Dialect, facts: ServerFacts | None) -> bool:
    """Return True if the prompts of the plan can have exactly the requested lengths on this server.

    Normally this requires that the server can count tokens, or that the user names a tokenizer. `facts` is None for the
    built-in simulated server, on which exact lengths are possible.
    """
    if plan.lengths in ("tokenizer", "approximate") or dialect.count_by_running is None:
        return False
    if facts is None or plan.tokenizer or plan.lengths == "exact":
        return True
    return any(route and route.path in facts.count_routes for route in (dialect.count, dialect.count_text))


def needs_test_request(dialect: Dialect, facts: ServerFacts) -> bool:
    """Return True if a test request must show whether the server or its gateway accepts a dialect.

    A dialect is the request and response format of an endpoint. The answer depends on the server:

    - True if the server does not list the model. If the server refuses the model, every request fails.
    - False for the native endpoint of the server's backend, unless the server may refuse some request fields.
    - False for a simulated server that states its version, because it accepts every field.
    - True otherwise.
    """
    if not facts.listed:
        return True
    native = facts.default_endpoint or BACKENDS[facts.name].native
    is_native = dialect.path == BACKENDS[facts.name].dialects[native].path
    if not dialect.refusable_fields and is_native:
        return False
    return not (facts.simulated and facts.version)


def max_length(tokens: int | str) -> int:
    """Return the maximum of a length distribution in tokens, such as 1024 for `uniform:128..1024`.

    Return 1 if the largest length is not known before the run. A length of 1 passes every check against the server's
    limits.
    """
    named = lengths.parse_outputs(str(tokens)).lengths
    if isinstance(named, lengths.Fixed):
        return named.length
    return named.high if isinstance(named, lengths.Uniform) else 1


def max_prompt_length(plan: Plan) -> int:
    """Return the length in tokens of the longest prompt of a plan, or 1 if it is not known before the run.

    In a session with several turns, this is the last prompt, because it contains all earlier turns and answers.
    """
    requested, answered = max_length(plan.input_tokens), max_length(plan.output_tokens)
    named = plan.prompt_source
    if isinstance(named, SessionFile):
        return 1
    if not isinstance(named, MultiTurn):
        return requested
    turns = named.turns
    return 1 if turns is None else turns * (requested + TURN_TOKENS) + (turns - 1) * (answered + TURN_TOKENS)


def simulated_name(facts: ServerFacts) -> str:
    """Return the name of a simulated server for messages, such as `SIMULATED vllm at 5 times speed`."""
    speed = " at unknown speed" if facts.speed is None else _times_speed(facts.speed)
    return f"SIMULATED {facts.name}{speed}"


def _times_speed(speed: float) -> str:
    """Return the speed of a simulated clock as text, such as ` at 5 times speed`, or an empty string for real time."""
    return "" if speed == 1 else f" at {speed:g} times speed"


def clock_speed(plan: Plan) -> float:
    """Return the speed of the clock of the plan's server. 1 is the speed of a real server, and 5 is five times as fast.

    If no server is found, a run of `plan` would start the built-in simulated server. The result is then the setting
    `speed` of the plan. This function itself starts no server. Raises loadgen.servers.errors.ServerError if the search
    for the server fails.
    """
    facts = _find_server(plan, access_for(plan))
    return plan.speed if facts is None else facts.speed or 1.0


def require_server(plan: Plan, purpose: str) -> None:
    """Raise UnreachableError if no real server is found, unless the plan requests the built-in simulated server.

    `purpose` is the option or command that needs a real server, such as `--assert`. The error message names it. Raises
    the same errors as `server_for`.
    """
    if not plan.simulated and _find_server(plan, access_for(plan)) is None:
        raise _no_server_for(plan, purpose)


def _find_server(plan: Plan, access: Access, say: Say | None = None) -> ServerFacts | None:
    """Return the facts of the plan's server, or None if the caller should use the built-in simulated server.

    If the server is busy, the function waits for it and calls `say` with a line of text.
    """
    from loadgen.servers.discovery import resolve

    if plan.simulated:
        return None
    url = _url_of(plan)
    detected_s, facts = _detected.pop((url or "", plan.first_model), (-inf, None))
    if facts and facts.name == plan.server and time.monotonic() - detected_s < DETECTED_VALID_S:
        return facts
    return resolve(plan.server, url, os.environ, real=plan.real, model=plan.first_model, access=access, say=say)


def _no_server(plan: Plan) -> str:
    """Return the message that no server was found at the default port of the plan's backend."""
    backend = BACKENDS[plan.server]
    return f"No {backend.title} server found on 127.0.0.1:{backend.port}"


def _no_server_for(plan: Plan, purpose: str) -> UnreachableError:
    return UnreachableError(
        f"{_no_server(plan)}, and {purpose} does not judge the built-in simulated server unless you ask for that",
        "Use --url for a real server, or --simulated for the built-in one.",
    )


def _url_of(plan: Plan, say: Say | None = None) -> str | None:
    """Return the server's URL from the plan or the environment, or None if neither contains one.

    Raises PlanError or SecretError for an invalid URL.
    """
    variable = BACKENDS[plan.server].url_variable
    environment_url = os.environ.get(variable)
    if plan.url or environment_url is None:
        return plan.url
    try:
        return _url_changes(plan, environment_url, variable, say)["url"]
    except SecretError as error:
        raise SecretError(f"{variable}: {error}", error.hint) from None
    except ValueError as error:
        raise PlanError(f"{variable} {environment_url}: {error}", "Fix it, or pass --url.") from None


def piece_advice(plan: Plan, facts: ServerFacts) -> str:
    """Return a message if the server would generate more or fewer output tokens than the plan requests.

    Some servers generate long responses in pieces of fixed size, for example 2,048 tokens. Such a response normally
    ends at the end of a piece. Return "" if the lengths are exact, or not known before the run.
    """
    from loadgen.servers.discovery import fitting_output

    piece = facts.notes.get("prompt_piece_tokens", 0)
    if not piece:
        return ""
    count = min(plan.n or MAX_CHECKED_LENGTHS, MAX_CHECKED_LENGTHS)
    requested = sorted({*islice(_requested_lengths(plan), count)}, key=itemgetter(1))
    actual = {output: fitting_output(facts, prompt, output) for prompt, output in requested}
    changed = {output: becomes for output, becomes in actual.items() if becomes != output}
    if not changed:
        return ""
    series = facts.version.partition(".")[0]
    what = f"{facts.title} {series}.x generates in pieces of {piece:,} tokens"
    shown = [f"{length:,} becomes {becomes:,}" for length, becomes in changed.items()]
    if len(shown) > SHOWN_LENGTHS:
        longest, becomes = [*changed.items()][-1]
        shown = [shown[0], f"and so on up to {longest:,}, which becomes {becomes:,}"]
    return f"{what}: {', '.join(shown)}. Ask for at most {piece:,}, or a multiple of it."


def truncation_advice(facts: ServerFacts, max_prompt: int) -> str:
    """Return a message if the server will truncate prompts of `max_prompt` tokens, otherwise an empty string."""
    limit = facts.notes.get("truncates_to")
    if limit is None or max_prompt <= limit:
        return ""
    return f"{facts.title} truncates inputs to {limit:,} tokens, so {max_prompt:,} tokens are more than it computes"


def _requested_lengths(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield the prompt length and the output length in tokens of each request of the plan.

    If the arrivals are a trace and the prompts are synthetic, both lengths are those in the trace. Otherwise the prompt
    length is that of the longest possible prompt, or 1 if this length is not known before the run. If the output
    lengths are not known before the run, nothing is yielded.
    """
    named = plan.arrival_process
    if isinstance(named, arrival_processes.Trace) and isinstance(plan.prompt_source, workload.Synthetic):
        yield from ((entry.input_tokens, entry.output_tokens) for entry in named.entries())
        return
    outputs = plan.output_lengths.lengths
    if outputs is not None:
        prompt = max_prompt_length(plan)
        yield from ((prompt, length) for length in outputs.tokens(plan.seed, "output"))


@contextlib.contextmanager
def server_for(
    plan: Plan,
    access: Access,
    say: Say,
    at_once: int,
    streams: int,
    tokens: int,
    about: Callable[[ServerFacts | None], str] = lambda _: "",
) -> Iterator[ServerFacts]:
    """Find the server of a plan, check the plan against the server's limits, and yield the facts about the server.

    If no server is found, a built-in simulated server runs until the `with` block ends. It serves up to `streams`
    requests at a time, each with up to `tokens` tokens. A plan with objectives needs a real server. If none is found
    for it, UnreachableError is raised, unless the plan requests a simulated server.

    - `access` contains the credentials, the TLS settings and the proxy.
    - `at_once` is the number of requests that are certainly in flight at the same time.
    - `say` prints a line for the user. One line names the server, and the lines after it give advice about the server.
    - `about` returns the end of the line that names the server. Its argument is the facts about the server, or None for
      the built-in simulated server.

    Raises loadgen.servers.errors.ServerError.
    """
    from loadgen.servers.discovery import check_limits, endpoint_dialect, exceeded_request_limit, probe

    dialect = endpoint_dialect(plan.server, plan.endpoint)
    max_prompt = max_prompt_length(plan) if dialect.count_by_running else 1
    max_output = max_length(plan.output_tokens) if dialect.has_output_length else 0
    facts = _find_server(plan, access, say)
    if facts is not None:
        name = simulated_name(facts) if facts.simulated else f"{facts.name} {facts.version}"
        not_named = "" if _url_of(plan, say) else " (the usual port; use --url for another)"
        others = "".join(f" and {url}" for url in plan.more_urls)
        say(f"{name.strip()} at {facts.url}{others}{not_named}{about(facts)}")
        check_limits(facts, at_once, max_prompt, max_output, batch_size=plan.batch_size, over_limit=plan.over_limit)
        exceeded = exceeded_request_limit(facts, at_once, plan.batch_size)
        if exceeded:
            say(f"sent on purpose (--over-limit): {exceeded}")
        for advice in filter(None, (piece_advice(plan, facts), truncation_advice(facts, max_prompt))):
            say(advice)
        yield facts
        return
    from loadgen.servers.hardware import DEFAULT_MODEL
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn_process

    if not plan.simulated:
        if plan.objectives:
            raise _no_server_for(plan, "--assert")
        say(f"{_no_server(plan)}. Using the built-in simulated server; use --url for a real one.")
    machine.allow_open_files(streams)  # the child inherits the limit
    backend = BACKENDS[plan.server]
    endpoint = plan.endpoint or backend.native
    shape = backend.simulated_shapes.get(endpoint)
    config = SimulatedConfig(
        server=plan.server,
        clock="batching",
        speed=plan.speed,
        model_shape=shape or DEFAULT_MODEL,
        tensor_parallel=1 if shape else SIMULATED_GPUS,
        max_concurrent_requests=streams * plan.batch_size,  # some servers count inputs
        max_model_len=max(tokens, max_prompt + round_up_to_pieces(max_output, dialect.max_piece_tokens)),
        seed=plan.seed,
    )
    modelled = f"{config.model_shape} on {config.tensor_parallel} x {config.gpu}"
    say(f"SIMULATED {plan.server}{_times_speed(plan.speed)}, a model of {modelled}{about(None)}")
    model = plan.first_model or backend.simulated_models.get(endpoint, config.model)
    adapters = tuple(name for name in plan.models if name != model)
    with spawn_process(replace(config, model=model, adapters=adapters)) as (url, pid):
        facts = probe(url, plan.server)
        for advice in filter(None, (piece_advice(plan, facts), truncation_advice(facts, max_prompt))):
            say(advice)
        yield structs.replace(facts, pids=(pid,))
