"""Whatever a client sends, a simulated server answers or refuses: it never breaks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.simulated.config import SERVERS, SimulatedConfig
from servers.simulated.metrics import Metrics
from servers.simulated.metrics_pages import bounds
from servers.simulated.server import WIRES
from servers.simulated.timing import Gauges
from servers.simulated.tokenizer import Babble
from servers.simulated.wire import Generation, Question, Refused, Reply, Site

LONGEST = 32
FIELDS = (
    *("model", "prompt", "inputs", "messages", "parameters", "max_tokens", "max_completion_tokens", "max_new_tokens"),
    *("stream", "stream_options", "include_usage", "continuous_usage_stats", "return_token_ids", "n", "best_of"),
    *("temperature", "top_p", "top_k", "stop", "details", "do_sample", "seed", "logprobs", "truncate", "suffix"),
    *("ignore_eos", "add_special_tokens", "return_full_text", "return_details", "role", "content"),
)
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
        "parameters": st.dictionaries(st.sampled_from(FIELDS), SCALARS, max_size=5),
    }
)


def site_of(server: str) -> Site:
    """A server without a network."""
    config = SimulatedConfig(server=server, model="m", max_model_len=LONGEST)
    return Site(config, Babble(0, LONGEST), Metrics(bounds(server, LONGEST)), 0, lambda: Gauges(0, 0, 0.0, 0))


SITES = {server: site_of(server) for server in SERVERS}
ROUTES = [(server, path) for server in SERVERS for path in WIRES[server].generate]


@pytest.mark.parametrize(("server", "path"), ROUTES)
@given(body=BODIES | st.tuples(LIKELY, BODIES).map(lambda pair: pair[0] | pair[1]), stop_after=st.none() | st.just(2))
def test_every_body_is_answered_or_refused(
    server: str, path: str, body: dict[str, Any], stop_after: int | None
) -> None:
    """Any JSON object becomes an answer that fits the context, whose events are well formed, or a refusal."""
    generation = outcome(server, path, Question(3, body, 0, stop_after))
    if isinstance(generation, Reply):
        assert generation.status in (200, 400, 404, 417, 422)
        return
    assert 1 <= generation.output_tokens <= generation.asked_tokens
    assert generation.prompt_tokens + generation.output_tokens <= LONGEST
    check_events(generation)
    json.loads(generation.answer(1.5).body)


def outcome(server: str, path: str, question: Question) -> Generation | Reply:
    """What comes of a request."""
    try:
        return WIRES[server].generate[path](SITES[server], question)
    except Refused as refused:
        return refused.reply


def check_events(generation: Generation) -> None:
    """Every event is `data:`, one line of JSON, and a blank line."""
    last = generation.output_tokens - 1
    events = [generation.event(place, 1, place == last) for place in range(generation.output_tokens)]
    for event in (*generation.opening, *events, *generation.closing, *generation.failure, *generation.role_only):
        assert event.startswith(b"data:")
        assert event.endswith(b"\n\n")
        payload = event.removeprefix(b"data:").strip()
        assert b"\n" not in payload
        assert payload == b"[DONE]" or json.loads(payload)
