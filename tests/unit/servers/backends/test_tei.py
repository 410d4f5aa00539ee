"""The TEI backend on recorded responses of TEI 1.9.3: what it recognises, its requests, counts and limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from loadgen.engine.resolve_server import truncation_advice
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.discovery import check_endpoint, check_limits, exceeded_request_limit
from loadgen.servers.errors import EndpointError, LimitError
from loadgen.workloads.request import Request
from tests.contract.recorded import TRANSCRIPTS, response
from tests.support.answers import recorded

TEI = BACKENDS["tei"]
URL = "http://h"


def identified(model: str, **changes: Any) -> ServerFacts:
    """The facts that the backend reads from the recorded page of a server with this model."""
    info = json.loads(response(f"tei-1.9.3/{model}/info.txt")[1]) | changes

    def get_json(path: str) -> tuple[int, Any]:
        return (200, info) if path == "/info" else (405, None)

    facts = TEI.identify(get_json, URL)
    assert facts is not None
    return replace(facts, title=TEI.title)  # as the probe does


@pytest.mark.parametrize(
    ("model", "name", "endpoints"),
    [
        ("embed", "tiny-bert", ("embed", "embeddings")),
        ("rerank", "tiny-rerank", ("rerank", "classify")),
        ("classify", "tiny-classify", ("classify",)),
    ],
)
def test_a_recorded_server_is_recognised(model: str, name: str, endpoints: tuple[str, ...]) -> None:
    """The type of the model decides which endpoints it has. Inputs are truncated, so their length is no limit."""
    facts = identified(model)
    assert (facts.name, facts.version, facts.model, facts.endpoints) == ("tei", "1.9.3", name, endpoints)
    assert facts.limits == {"max_client_batch_size": 32, "max_concurrent_requests": 512, "max_batch_tokens": 16384}
    assert facts.notes == {"truncates_to": 512}
    assert facts.count_routes == ("/tokenize",)
    other = next(endpoint for endpoint in TEI.dialects if endpoint not in endpoints)
    with pytest.raises(EndpointError, match=f"--endpoint {other}: the model {name} at http://h does not support it"):
        check_endpoint(facts, other)


def test_it_is_not_tgi_and_tgi_is_not_it() -> None:
    """Both have a page /info with the same limits."""
    info = json.loads(response("tei-1.9.3/embed/info.txt")[1])
    assert BACKENDS["tgi"].identify(lambda _: (200, info), URL) is None
    tgi = json.loads(response("tgi-3.3.7/info.txt")[1])
    assert TEI.identify(lambda _: (200, tgi), URL) is None


def test_limits_count_inputs() -> None:
    """Each input takes one of the server's places. Above 32 inputs, it refuses the request."""
    facts = identified("embed")
    check_limits(facts, 512, 512, 0)
    check_limits(facts, 16, 512, 0, batch_size=32)
    with pytest.raises(LimitError) as caught:
        check_limits(facts, 17, 512, 0, batch_size=40)
    assert "40 inputs per request exceed its max_client_batch_size of 32" in str(caught.value)
    assert "680 inputs at once exceed its max_concurrent_requests of 512" in str(caught.value)
    assert "--max-client-batch-size, --max-concurrent-requests" in caught.value.hint
    assert exceeded_request_limit(facts, 513) == "513 requests at once exceed its max_concurrent_requests of 512"


def test_long_inputs_are_announced_or_refused() -> None:
    """With --auto-truncate the server cuts them without a word, without it it refuses them."""
    assert "TEI truncates inputs to 512 tokens" in truncation_advice(identified("embed"), 2000)
    assert truncation_advice(identified("embed"), 512) == ""
    strict = identified("embed", auto_truncate=False)
    check_limits(strict, 1, 512, 0)
    with pytest.raises(LimitError) as caught:
        check_limits(strict, 1, 513, 0)
    assert "513 prompt tokens exceed its max_input_length of 512" in str(caught.value)
    assert caught.value.hint == "request less"


def test_requests_are_these_bytes() -> None:
    """/predict takes a list per input, because two texts in one list are a pair."""
    one, two = Request(0, "a b", 2, 0), Request(0, "a b", 4, 0, batch=("a c",), inputs=2)
    bodies = {name: [dialect.encode(request, "m") for request in (one, two)] for name, dialect in TEI.dialects.items()}
    assert bodies == {
        "embed": [b'{"inputs":"a b"}', b'{"inputs":["a b","a c"]}'],
        "embeddings": [b'{"model":"m","input":"a b"}', b'{"model":"m","input":["a b","a c"]}'],
        "rerank": [b'{"query":"a","texts":[" b"]}', b'{"query":"a","texts":[" b"," c"]}'],
        "classify": [b'{"inputs":[["a b"]]}', b'{"inputs":[["a b"],["a c"]]}'],
    }
    own = Request(0, "a b", 0, 0, body={"texts": ["c", "d"], "truncate": False})
    assert TEI.dialects["rerank"].encode(own, "m") == b'{"query":"a b","texts":["c","d"],"truncate":false}'


@pytest.mark.parametrize(
    ("file", "endpoint", "inputs", "tokens"),
    [
        ("embed/embed", "embed", 1, 4),
        ("embed/embed_batch", "embed", 2, 5),
        ("embed/embed_truncate", "embed", 1, 512),
        ("embed/openai_embeddings_batch", "embeddings", 2, 3),
        ("rerank/rerank", "rerank", 3, 10),
        ("classify/predict_batch", "classify", 2, 3),
    ],
)
def test_counts_come_from_the_header_or_the_usage(file: str, endpoint: str, inputs: int, tokens: int) -> None:
    """The native routes report the tokens of all inputs in x-compute-tokens."""
    raw = (TRANSCRIPTS / f"tei-1.9.3/{file}.txt").read_bytes().rstrip(b"\n")
    record, _ = recorded(("tei", endpoint), raw=raw, asked=0)
    assert (record.state, record.prompt_tokens, record.marks) == ("complete", tokens, {"inputs": inputs})


def test_a_route_that_counts_reads_lists_and_headers() -> None:
    """/tokenize lists tokens; a pair of query and document is counted by running it."""
    count = TEI.dialects["embed"].count
    assert count is not None
    assert count.read(json.loads(response("tei-1.9.3/embed/tokenize.txt")[1])) == 4
    running = TEI.dialects["rerank"].count_by_running
    assert (running.header, running.read("7")) == ("x-compute-tokens", 7)
    assert running.body("a b", "m") == {"query": "a", "texts": [" b"]}


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"[]", "neither embeddings nor scores: []"),
        (b"[[0.5]", "event 0 is not of this dialect"),
        (b'{"error":"Backend error: no","error_type":"Backend"}', "Backend error: no (Backend)"),
    ],
)
def test_what_is_no_list_of_results_is_an_error(payload: bytes, said: str) -> None:
    """An empty list, half a list, an error with status 200."""
    answer = TEI.dialects["embed"].decode([payload])
    assert (answer.end_event, bool(answer.error_kind)) == (None, True)
    assert answer.error_detail.startswith(said)
