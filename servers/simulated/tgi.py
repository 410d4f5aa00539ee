"""TGI's side of the wire, as 3.3.7 speaks it (router/src/server.rs and validation.rs at that tag)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, log
from random import Random
from typing import Any

from servers.simulated import tgi_answers, tokenizer
from servers.simulated.bodies import chat_text, number
from servers.simulated.tgi_answers import Said, flat_error, openai_error
from servers.simulated.tgi_pages import DEFAULT_LIMIT, MOST_PROMPTS, MOST_STOPS, PAGES, max_input_tokens, untyped
from servers.simulated.wire import TEXT_TYPE, Generation, Headers, Question, Refused, Reply, Site, Wire, events_reply

_STREAM_TYPE: Headers = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
_OVERLOADED = ("Model is overloaded", "overloaded")


def generate(site: Site, question: Question) -> Generation:
    """POST /generate."""
    return _native(site, question, streamed=False)


def generate_stream(site: Site, question: Question) -> Generation:
    """POST /generate_stream."""
    return _native(site, question, streamed=True)


def compatible(site: Site, question: Question) -> Generation:
    """POST /: the body says whether to stream, and without streaming the answer is a list of one."""
    streamed = bool(question.body.get("stream"))
    generation = _native(site, question, streamed=streamed)
    if streamed:
        return generation

    def listed(total_s: float) -> Reply:
        reply = generation.answer(total_s)
        return replace(reply, body=b"[%b]" % reply.body)

    return replace(generation, answer=listed)


def chat(site: Site, question: Question) -> Generation:
    """POST /v1/chat/completions."""
    body = question.body
    refuse = _refuser(streamed=bool(body.get("stream")), openai=True)
    if not isinstance(body.get("messages"), list):
        raise untyped("missing field `messages`")
    if not isinstance(body.get("stream_options", {}), Mapping):  # null is refused too, since v3.2.0
        raise untyped("stream_options: invalid type, expected struct StreamOptions")
    asked = body.get("max_tokens", body.get("max_completion_tokens"))
    parameters = _openai_parameters(body, asked)
    return tgi_answers.chat(_said(site, question, chat_text(body["messages"]), parameters, refuse))


def completions(site: Site, question: Question) -> Generation:
    """POST /v1/completions."""
    body = question.body
    refuse = _refuser(streamed=bool(body.get("stream")), openai=True)
    if body.get("suffix") is not None:
        message = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise Refused(Reply(flat_error(message, "suffix not supported"), 422))
    prompt = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise untyped("prompt: data did not match any variant of untagged enum PromptInput")
    if len(prompts) > 1:
        most = 1 if len(prompts) <= MOST_PROMPTS else MOST_PROMPTS  # one is our limit, not TGI's
        message = f"Number of prompts exceeds the maximum allowed batch size of {most}"
        raise Refused(Reply(flat_error(message, "batch size exceeded"), 422))
    parameters = _openai_parameters(body, body.get("max_tokens"))
    return tgi_answers.completions(_said(site, question, prompts[0], parameters, refuse))


def _native(site: Site, question: Question, *, streamed: bool) -> Generation:
    body = question.body
    if not isinstance(body.get("inputs"), str):
        raise untyped("missing field `inputs`" if "inputs" not in body else "inputs: invalid type, expected a string")
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise untyped("parameters: invalid type, expected struct GenerateParameters")
    refuse = _refuser(streamed=streamed, openai=False)
    if streamed and parameters.get("decoder_input_details"):
        raise refuse("`decoder_input_details` == true is not supported when streaming tokens")
    question = replace(question, body={**body, "stream": streamed})
    return tgi_answers.native(_said(site, question, body["inputs"], parameters, refuse))


Refuse = Callable[[str], Refused]


def _said(site: Site, question: Question, prompt: str, parameters: Mapping[str, Any], refuse: Refuse) -> Said:
    """Checks what validation.rs checks, in its order, and settles the output's length."""
    _check_values(parameters, refuse)
    if not prompt:
        raise refuse("`inputs` cannot be empty")
    prompt_tokens = 1 + tokenizer.count(prompt)  # the server puts one before every text
    truncate = parameters.get("truncate")
    prompt_tokens = min(prompt_tokens, ceil(truncate)) if truncate else prompt_tokens
    longest = site.config.max_model_len
    asked = parameters.get("max_new_tokens")
    asked = max(0, longest - prompt_tokens) if asked is None else ceil(asked)
    # Only the first 1024 of a long output count here: the rest is queued again, `DEFAULT_GENERATION_LENGTH`.
    first = min(asked, 1024)
    if prompt_tokens + first > longest:
        limit = f"`inputs` tokens + `max_new_tokens` must be <= {longest}."
        raise refuse(f"{limit} Given: {prompt_tokens} `inputs` tokens and {first} `max_new_tokens`")
    if prompt_tokens > max_input_tokens(site):
        raise refuse(f"`inputs` must have less than {max_input_tokens(site)} tokens. Given: {prompt_tokens}")
    asked = min(asked, longest - prompt_tokens)
    stop = min(filter(None, (question.stop_after, _end_of_sequence(site, question.index))), default=asked)
    output, ended = (stop, "eos_token") if stop < asked else (asked, "length")
    return Said(site, question, prompt, prompt_tokens, asked, output, ended)


def _end_of_sequence(site: Site, index: int) -> int | None:
    """Where the model ends by itself: geometric, as if each token were the last with the same probability."""
    mean = site.config.eos_mean_tokens
    if mean is None:
        return None
    uniform = Random(f"eos/{site.config.seed}/{index}").random()  # noqa: S311 - not secret
    return 1 if mean <= 1 else 1 + int(log(1 - uniform) / log(1 - 1 / mean))


# Name, what is allowed, and validation.rs's words for the rest.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("best_of", lambda value: value == 1, "`best_of` != 1 is not supported by the simulated server"),
    ("temperature", lambda value: value > 0, "`temperature` must be strictly positive"),
    ("repetition_penalty", lambda value: value > 0, "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("top_p", lambda value: 0 < value < 1, "`top_p` must be > 0.0 and < 1.0"),
    ("typical_p", lambda value: 0 < value < 1, "`typical_p` must be > 0.0 and < 1.0"),
    ("top_k", lambda value: value > 0, "`top_k` must be strictly positive"),
    ("max_new_tokens", lambda value: value > 0, "`max_new_tokens` must be strictly positive"),
    ("truncate", lambda value: value > 0, "`truncate` must be strictly positive and less than the limit"),
)


def _check_values(parameters: Mapping[str, Any], refuse: Refuse) -> None:
    for name, allows, message in _RULES:
        value = number(parameters.get(name))
        if value is None and parameters.get(name) is not None:
            raise untyped(f"{name}: invalid type, expected a number")
        if value is not None and not allows(value):
            raise refuse(message)
    stops = parameters.get("stop") or []
    if not isinstance(stops, list):
        raise untyped("stop: invalid type, expected a sequence")
    if len(stops) > MOST_STOPS:
        raise refuse(f"`stop` supports up to {MOST_STOPS} stop sequences. Given: {len(stops)}")


def _openai_parameters(body: Mapping[str, Any], asked: Any) -> dict[str, Any]:
    """The native parameters that the OpenAI routes make; zero is the legal way to ask for greedy here."""
    names = ("top_p", "frequency_penalty", "stop", "seed", "repetition_penalty")
    parameters = {name: body[name] for name in names if body.get(name) is not None}
    if number(body.get("temperature")):
        parameters["temperature"] = body["temperature"]
    return parameters | {"max_new_tokens": asked}


def _refuser(*, streamed: bool, openai: bool) -> Refuse:
    """Validation errors are a 422, but an event under status 200 once the answer is a stream."""

    def refuse(message: str) -> Refused:
        said = f"Input validation error: {message}"
        if not streamed:
            return Refused(Reply(flat_error(said, "validation"), 422))
        return Refused(_error_stream(said, "validation", openai=openai))

    return refuse


def _error_stream(message: str, kind: str, *, openai: bool) -> Reply:
    payloads = (openai_error(message), b"[DONE]") if openai else (flat_error(message, kind),)
    return events_reply(*payloads, headers=_STREAM_TYPE)


def _overloaded(refused: Generation) -> Reply:
    if not refused.streamed:
        return Reply(flat_error(*_OVERLOADED), 429)
    return _error_stream(*_OVERLOADED, openai=bool(refused.closing))


def _failure(status: int) -> Reply:
    said = {
        429: _OVERLOADED,
        500: ("Incomplete generation", "incomplete_generation"),
        503: ("unhealthy", "healthcheck"),
    }
    return Reply(flat_error(*said[status]), status)


WIRE = Wire(
    before="",
    after=(
        "access-control-allow-origin: *\r\n"
        "vary: origin, access-control-request-method, access-control-request-headers\r\n"
        "date: {date}\r\n"
    ),
    stream_headers=_STREAM_TYPE,
    keep_alive_s=3600,
    body_limit=2_000_000,
    generate={
        "/": compatible,
        "/generate": generate,
        "/generate_stream": generate_stream,
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
    },
    pages=PAGES,
    bad_type=Reply(b"Expected request with `Content-Type: application/json`", 415, TEXT_TYPE),
    bad_json=lambda message, position: Reply(
        f"Failed to parse the request body as JSON: {message} at line 1 column {position + 1}".encode(), 400, TEXT_TYPE
    ),
    too_large=Reply(b"length limit exceeded", 413, TEXT_TYPE),
    not_found=Reply(status=404, headers=()),
    not_allowed=lambda methods: Reply(status=405, headers=(("allow", methods),)),
    failure=_failure,
    overloaded=_overloaded,
    guarded=lambda path: path not in ("/health", "/ping", "/info", "/metrics", "/v1/models"),
    unauthorized=Reply(status=401, headers=()),
    default_limit=DEFAULT_LIMIT,
)
