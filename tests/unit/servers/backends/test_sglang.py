"""The SGLang backend on recorded pages of SGLang 0.5.23: what it recognises, and which limits it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.servers.discovery import check_limits
from loadgen.servers.errors import LimitError, UnauthorizedError
from tests.contract.recorded import response

SGLANG = BACKENDS["sglang"]
URL = "http://h"


def recorded(name: str) -> Any:
    """Return the JSON of a recorded response."""
    return json.loads(response(f"sglang-0.5.23/{name}.txt")[1])


PAGES = {"/v1/models": "models", "/server_info": "server_info"}


def get_json(path: str) -> tuple[int, Any]:
    """Answer as the recorded server does. A GET of /tokenize is not allowed, because the route takes a POST."""
    if path == "/tokenize":
        return 405, {"detail": "Method Not Allowed"}
    return (200, recorded(PAGES[path])) if path in PAGES else (404, {"detail": "Not Found"})


def test_a_recorded_server_is_recognised() -> None:
    """The version, the limits and the route that counts tokens are read. Limits that are not set are left out."""
    facts = SGLANG.identify(get_json, URL)
    assert facts is not None
    assert (facts.name, facts.version, facts.model) == ("sglang", "0.5.23", "tiny")
    assert facts.limits == {"max_model_len": 4096, "max_req_input_len": 4090, "max_total_num_tokens": 1_531_990}
    assert facts.count_routes == ("/tokenize",)


def test_facts_that_a_server_hides_are_unknown() -> None:
    """The page may need an administrator's key, or a gateway may not publish it. The list of models is enough."""

    def only_models(path: str) -> tuple[int, Any]:
        if path == "/server_info":
            raise UnauthorizedError("no", "")
        return get_json(path) if path == "/v1/models" else (404, None)

    facts = SGLANG.identify(only_models, URL)
    assert facts is not None
    assert (facts.version, facts.limits, facts.count_routes) == ("", {"max_model_len": 4096}, ())


@pytest.mark.parametrize("owner", ["vllm", "unknown"])
def test_another_owner_is_another_server(owner: str) -> None:
    """Only a server that names SGLang as the owner of its models is SGLang."""
    card = recorded("models")["data"][0] | {"owned_by": owner}
    assert SGLANG.identify(lambda _: (200, {"data": [card]}), URL) is None


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "message"),
    [
        (4000, 94, ""),
        (4000, 95, "4000 prompt + 95 output tokens exceed its max_model_len of 4096 (2 of them cannot be used)"),
        (4089, 1, ""),
        (4090, 1, "4090 prompt tokens exceed its max_req_input_len of 4090 (1 of them cannot be used)"),
    ],
)
def test_the_end_of_the_context_cannot_be_used(input_tokens: int, output_tokens: int, message: str) -> None:
    """SGLang would shorten such a response without a word. The hint names SGLang's own option."""
    facts = SGLANG.identify(get_json, URL)
    assert facts is not None
    if not message:
        check_limits(facts, 1000, input_tokens, output_tokens)
        return
    with pytest.raises(LimitError) as caught:
        check_limits(facts, 1000, input_tokens, output_tokens)
    assert message in str(caught.value)
    assert "--context-length" in caught.value.hint


def test_prompts_are_counted_by_the_recorded_routes() -> None:
    """The bodies ask for what the server will see: a text with special tokens, or a chat with its template."""
    completions, chat = SGLANG.dialects["completions"].count, SGLANG.dialects["chat"].count
    assert completions is not None
    assert chat is not None
    assert completions.body("ba de", "m") == {"model": "m", "prompt": "ba de"}
    assert completions.read(recorded("tokenize")) == 4
    assert chat.body("ba de", "m") == {"model": "m", "messages": [{"role": "user", "content": "ba de"}]}
    assert chat.read(recorded("tokenize_messages")) == 20
    assert SGLANG.ids is not None
    assert SGLANG.ids.read(recorded("tokenize_nospecial")) == [424, 371, 356, 426]


@pytest.mark.parametrize(("status", "kind"), [(503, "rejected"), (500, "in_band_error")])
def test_an_aborted_request_states_its_reason(status: int, kind: str) -> None:
    """The finish reason of /generate has the message and the status code that other endpoints send as an error."""
    reason = {"type": "abort", "message": "The request queue is full.", "status_code": status}
    event = {"text": "", "output_ids": [], "meta_info": {"prompt_tokens": 4, "finish_reason": reason}}
    answer = SGLANG.dialects["generate"].decode([json.dumps(event).encode(), b"[DONE]"])
    assert (answer.error_kind, answer.error_detail) == (kind, f"The request queue is full. ({status})")
    assert answer.finish_reason == "abort"
