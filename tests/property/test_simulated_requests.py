"""Whatever a client sends, a simulated server answers or refuses: it never breaks."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st

from loadgen.servers.backends import simulated_backends, simulated_versions
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.server import find_protocol
from loadgen.servers.simulated.state import ServerState
from loadgen.servers.simulated.token_clock import Gauges

LONGEST = 32
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
FIELDS = (
    *("model", "prompt", "inputs", "messages", "parameters", "max_tokens", "max_completion_tokens", "max_new_tokens"),
    *("stream", "stream_options", "include_usage", "continuous_usage_stats", "return_token_ids", "n", "best_of"),
    *("temperature", "top_p", "top_k", "stop", "details", "do_sample", "seed", "logprobs", "truncate", "suffix"),
    *("echo", "top_logprobs", "prompt_logprobs", "min_tokens", "presence_penalty", "tools", "input", "instructions"),
    *("response_format", "tool_choice", "grammar", "top_n_tokens", "decoder_input_details", "type", "value"),
    *("ignore_eos", "add_special_tokens", "return_full_text", "return_details", "role", "content"),
)
SAMPLING_FIELDS = ("max_new_tokens", "min_new_tokens", "stop", "temperature", "n", "ignore_eos")
SCALARS = st.none() | st.booleans() | st.integers(-2, 40) | st.floats(-2, 40) | st.sampled_from(["", "m", "a b", "7"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
LIKELY = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "prompt": st.just("a"),
        "inputs": st.just("a"),
        "messages": st.just([{"role": "user", "content": "a"}]),
        "input": VALUES | st.just("a"),
        "query": VALUES | st.just("a"),
        "documents": VALUES | st.just(["a"]),
        "top_n": SCALARS,
        "tools": st.none() | st.just([TOOL]),
        "parameters": st.dictionaries(st.sampled_from(FIELDS), SCALARS, max_size=5),
        "text": st.just("a"),
        "sampling_params": SCALARS | st.dictionaries(st.sampled_from(SAMPLING_FIELDS), VALUES, max_size=5),
    }
)


def state_of(server: str) -> ServerState:
    """A server without a network."""
    config = SimulatedConfig(server=server, model="m", max_model_len=LONGEST)
    return ServerState(config, find_protocol(server).buckets, lambda: Gauges(0, 0, 0.0, 0))


STATES = {server: state_of(server) for server in simulated_backends()}
VERSIONS = [(server, "") for server in simulated_backends()]
VERSIONS += [(server, version) for server, versions in simulated_versions().items() for version in versions]
ROUTES = [(*kind, path) for kind in VERSIONS for path in find_protocol(*kind).generate]


@given(body=BODIES | st.tuples(LIKELY, BODIES).map(lambda pair: pair[0] | pair[1]), stop_after=st.none() | st.just(2))
def test_every_body_is_answered_or_refused(body: dict[str, Any], stop_after: int | None) -> None:
    """Any JSON object becomes, on every route of every server, an answer that fits the context, whose events are well
    formed, or a refusal. One body for all: making it takes longer than answering it."""
    for server, version, path in ROUTES:
        note(f"{server} {version} {path}")
        check(outcome(server, version, path, CompletionRequest(3, path, deepcopy(body), 0, stop_after)))


def check(encoding: Encoding | Reply) -> None:
    """A refusal has a status for it; an answer fits."""
    if isinstance(encoding, Reply):
        # 424: what TEI says of a model of another type. 500: what LightLLM 0.0.1 says on its chat route.
        assert encoding.status in (200, 400, 404, 417, 422, 424, 500)
        return
    completion = encoding.completion
    if encoding.media:  # audio: neither events nor JSON
        assert encoding.answer(1.5).body
        return
    if completion.requested_tokens:  # embeddings and scores generate nothing
        assert 1 <= completion.output_tokens <= completion.requested_tokens
        assert completion.prompt_tokens + completion.output_tokens <= LONGEST
        check_events(encoding)
    with suppress(ErrorReply):  # a tool call that the limit cut short is no JSON
        json.loads(encoding.answer(1.5).body)


def outcome(server: str, version: str, path: str, request: CompletionRequest) -> Encoding | Reply:
    """What comes of a request."""
    protocol = find_protocol(server, version)
    try:
        fields = protocol.read_body(path, json.dumps(request.body).encode())
        return protocol.generate[path](STATES[server], replace(request, body=fields))
    except ErrorReply as refused:
        return refused.reply


def check_events(encoding: Encoding) -> None:
    """Every event is `data:`, one line of JSON, and a blank line."""
    last = encoding.completion.steps - 1
    events = [encoding.encode(place, 1, place == last) for place in range(last + 1)]
    if encoding.silent:
        events = [event for event in events if event]
    for event in (*encoding.opening, *events, *encoding.closing, *encoding.failure, *encoding.role_only):
        assert event.endswith(b"\n\n")
        for each in event.removesuffix(b"\n\n").split(b"\n\n"):  # several answers of one request leave together
            head, _, data = each.rpartition(b"data:")
            assert re.fullmatch(rb"(event: [a-z_.]+\n)?", head)
            assert b"\n" not in data
            assert data.strip() == b"[DONE]" or json.loads(data)
