"""Which server is this, and what are its limits? Asked once, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from servers.errors import LimitError, UnauthorizedError, WrongServerError

if TYPE_CHECKING:
    import ssl

Ask = Callable[[str], tuple[int, Any]]
"""GET a path: HTTP status, and JSON or None."""

TITLES = {"vllm": "vLLM", "tgi": "TGI", "lightllm": "LightLLM", "openai": "an OpenAI-style server"}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself."""

    name: str
    """`vllm`, `tgi`, `lightllm` or `openai`."""
    url: str
    """Base of all its paths: no slash at the end, no `/v1`."""
    version: str = ""
    """As the server states it. LightLLM states none: concluded from its routes. Empty when unknown."""
    model: str = ""
    """The name to ask for, which is the first one it lists; empty when it does not say."""
    limits: dict[str, int] = field(default_factory=dict)
    """Under the server's own names: max_model_len, max_input_tokens, max_total_tokens, max_concurrent_requests, ..."""
    count_routes: tuple[str, ...] = ()
    """Its routes that count the tokens of a text without running it."""
    simulated: bool = False
    speed: float | None = None
    """How many times faster than life a simulated server's clock runs."""
    pids: tuple[int, ...] = ()
    """Its processes on this machine, where we started it."""


def probe(url: str, server: str, *, api_key: str | None = None, verify: ssl.SSLContext | bool = True) -> ServerFacts:
    """Ask the server at `url` who it is. `server` is a key of TITLES.

    Raises UnreachableError, UnauthorizedError, and WrongServerError when it is not the server named.
    """
    from servers.calls import Caller  # 15 ms that finding no server at all must not cost

    base = base_url(url)
    with closing(Caller(base, api_key, verify)) as ask:
        facts = RECOGNISE[server](ask, base)
        if facts is None:
            raise _wrong_server(ask, base, server)
        return _mark_simulated(ask, facts)


def base_url(url: str) -> str:
    """The URL that a server's paths are appended to: many people paste one that ends in `/v1`."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def check_limits(facts: ServerFacts, n: int, input_tokens: int, output_tokens: int) -> None:
    """Compare a burst of `n` requests with the server's limits. Raises LimitError that lists every one exceeded.

    Servers answer too much work in quiet ways: vLLM and LightLLM shorten the output, TGI answers 200 with an error
    inside the stream, so the burst is refused here instead.
    """
    tokens = f"{input_tokens} prompt + {output_tokens} output tokens"
    needs = {
        "max_model_len": (input_tokens + output_tokens, tokens),
        "max_total_tokens": (input_tokens + output_tokens, tokens),
        "max_input_tokens": (input_tokens, f"{input_tokens} prompt tokens"),
        "max_concurrent_requests": (n, f"{n} requests at once"),
    }
    exceeded = [limit for limit, (need, _) in needs.items() if need > facts.limits.get(limit, need)]
    if exceeded:
        said = [f"{needs[limit][1]} exceed its {limit} of {facts.limits[limit]}" for limit in exceeded]
        flags = ["--max_req_total_len" if facts.name == "lightllm" else _flag(limit) for limit in exceeded]
        raise LimitError(
            f"{TITLES[facts.name]} at {facts.url}: {'; '.join(said)}",
            f"ask for less, or restart the server with a higher {', '.join(flags)}",
        )


def _flag(limit: str) -> str:
    """vLLM and TGI name a limit as the option that sets it."""
    return "--" + limit.replace("_", "-")


def _vllm(ask: Ask, url: str) -> ServerFacts | None:
    # 0.2.0 has no /version, but names itself as the owner of its models.
    status, models = ask("/v1/models")
    card = _first_card(models)
    if status != 200 or card.get("owned_by") != "vllm":
        return None
    version = _dict(ask("/version")[1]).get("version", "")
    return ServerFacts(
        "vllm", url, str(version), str(card.get("id", "")), _limits(card), _count_routes(ask, "/tokenize")
    )


def _tgi(ask: Ask, url: str) -> ServerFacts | None:
    status, answer = ask("/info")
    info = _dict(answer)
    if status != 200 or "model_id" not in info or "max_concurrent_requests" not in info:
        return None
    # The version of a release can read like a development one (3.3.7 says 3.3.6-dev0); the label tells the build.
    label = info.get("docker_label")
    version = f"{info.get('version', '')} ({label})" if label else str(info.get("version", ""))
    renamed = {"max_input_tokens": info["max_input_length"]} if "max_input_length" in info else {}
    limits = _limits(renamed | info)
    return ServerFacts(
        "tgi", url, version, str(info["model_id"]), limits, _count_routes(ask, "/tokenize", "/chat_tokenize")
    )


def _lightllm(ask: Ask, url: str) -> ServerFacts | None:
    name = _dict(ask("/get_model_name")[1])
    if "model_name" not in name and "logical_max_load" not in _dict(ask("/token_load")[1]):
        return None
    card = _first_card(ask("/v1/models")[1])
    # Both came with 1.0. Asking /tokens itself, without a text, would count as a failed request in its metrics.
    routes = ("/tokens",) if "model_name" in name else ()
    model = str(card.get("id") or name.get("model_name", ""))
    limits = _limits(_dict(ask("/get_server_info")[1]) | card)
    return ServerFacts("lightllm", url, _lightllm_version(ask, bool(card), bool(routes)), model, limits, routes)


def _lightllm_version(ask: Ask, lists_models: bool, names_model: bool) -> str:
    """LightLLM does not state its version; its routes grew: /get_model_name, then /v1/completions, then /v1/models."""
    if lists_models:
        return "1.2.0 or later"
    if _exists(ask, "/v1/completions"):
        return "1.1.0"
    return "1.0" if names_model else "before 1.0"


def _openai(ask: Ask, url: str) -> ServerFacts | None:
    status, models = ask("/v1/models")
    if status != 200 or not isinstance(_dict(models).get("data"), list):
        return None
    card = _first_card(models)
    return ServerFacts("openai", url, "", str(card.get("id", "")), _limits(card))


RECOGNISE: dict[str, Callable[[Ask, str], ServerFacts | None]] = {
    "tgi": _tgi,
    "vllm": _vllm,
    "lightllm": _lightllm,
    "openai": _openai,
}
"""Each server by what only it answers. The generic one comes last: most servers answer like it as well."""

LIMITS = (
    "max_model_len",  # vLLM, LightLLM: prompt and output together
    "max_input_tokens",  # TGI
    "max_total_tokens",  # TGI: prompt and output together
    "max_concurrent_requests",  # TGI refuses what is beyond, it does not wait
    "max_batch_total_tokens",  # TGI 1.x and 2.x
    "max_total_token_num",  # LightLLM: KV cache in tokens
    "max_req_total_len",  # LightLLM
    "running_max_req_size",  # LightLLM: beyond it requests wait without order
)


def _wrong_server(ask: Ask, url: str, named: str) -> WrongServerError:
    try:
        found = next((facts for recognise in RECOGNISE.values() if (facts := recognise(ask, url))), None)
    except UnauthorizedError:
        found = None
    if found is None:
        return WrongServerError(
            f"something answers at {url}, but it is not {TITLES[named]}",
            "check host, port and path in --url",
            named=named,
            found="",
        )
    title = f"{TITLES[found.name]} {found.version}".rstrip()
    return WrongServerError(
        f"this is {title}, not {TITLES[named]}: {url}", f"use --server {found.name}", named=named, found=found.name
    )


def _mark_simulated(ask: Ask, facts: ServerFacts) -> ServerFacts:
    status, answer = ask("/simulated/status")
    speed = _dict(answer).get("speed")
    if status != 200 or not isinstance(speed, int | float):
        return facts
    return replace(facts, simulated=True, speed=float(speed))


def _count_routes(ask: Ask, *paths: str) -> tuple[str, ...]:
    return tuple(path for path in paths if _exists(ask, path))


def _exists(ask: Ask, path: str) -> bool:
    """Whether a route that takes POST is there: then GET is answered with another error than 404."""
    return ask(path)[0] != 404


def _limits(facts: dict[str, Any]) -> dict[str, int]:
    return {name: facts[name] for name in LIMITS if isinstance(facts.get(name), int)}


def _first_card(models: object) -> dict[str, Any]:
    cards = _dict(models).get("data")
    return _dict(cards[0]) if isinstance(cards, list) and cards else {}


def _dict(answer: object) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}
