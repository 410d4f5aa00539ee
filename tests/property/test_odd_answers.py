"""Whatever a server answers before and beside a run: facts, a refusal or a gap, and no other exception."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.dialect import Route
from loadgen.servers.discovery import ServerTokenizer
from loadgen.servers.errors import ServerError, UncountableError
from loadgen.servers.json_client import JsonClient, JsonResponse
from loadgen.servers.telemetry import GapError, page_values, parse_page

NAMES = (
    *("data", "id", "object", "owned_by", "version", "max_model_len", "root", "error", "detail", "model_id", "count"),
    *("max_total_tokens", "max_input_tokens", "max_concurrent_requests", "tokens", "ntokens", "usage", "prompt_tokens"),
    *("max_total_token_num", "token_load", "current_load", "details", "prefill", "tokenize_response", "model_name"),
)
ODD = st.sampled_from(
    [None, True, -1, 0, 7, 2**63, 10**30, 1e308, 0.5, "", "vllm", "lightllm", "text-generation-inference"]
)
ANSWERS = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=20,
)
STATUS = st.sampled_from([200, 200, 200, 400, 404, 405, 422, 500])

FEWER = settings(max_examples=40)
"""Each backend and each route has as many examples."""


def asked(answers: st.DataObject) -> Callable[..., tuple[int, Any]]:
    return lambda *_: (answers.draw(STATUS), answers.draw(ANSWERS))


@pytest.mark.parametrize("kind", BACKENDS.values(), ids=BACKENDS)
@FEWER
@given(answers=st.data())
def test_any_answer_is_a_server_or_none(kind: Any, answers: st.DataObject) -> None:
    """Each kind looks at what it gets, and takes nothing for granted."""
    with contextlib.suppress(ServerError):
        facts = kind.identify(asked(answers), "http://x")
        assert facts is None or all(value > 0 for value in facts.limits.values())


class OddClient:
    """A client whose server answers anything."""

    mark = None

    def __init__(self, answers: st.DataObject) -> None:
        self._answers = answers

    def request(self, _path: str, _body: object = None) -> JsonResponse:
        return JsonResponse(self._answers.draw(STATUS), msgspec.json.encode(self._answers.draw(ANSWERS)))

    def note_mark(self, _value: object) -> None:
        """No answer has a mark that this test looks at."""


ROUTES = {
    f"{kind.name} {route.path}": route
    for kind in BACKENDS.values()
    for route in (
        kind.ids,
        *(each for dialect in kind.dialects.values() for each in (dialect.count, dialect.count_text)),
    )
    if route is not None
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@FEWER
@given(answers=st.data())
def test_any_answer_is_a_count_or_none(route: Route[Any], answers: st.DataObject) -> None:
    """A count, or the server is said not to count."""
    with contextlib.suppress(UncountableError):
        ServerTokenizer(cast(JsonClient, OddClient(answers)), route, "m", route).count(["text"])


WORDS = [name for kind in BACKENDS.values() if kind.metrics for names in kind.metrics.names.values() for name in names]
LINES = st.builds(
    "{}{}{} {}".format,
    st.sampled_from(["", "# TYPE ", "# HELP "]),
    st.sampled_from(WORDS),
    st.sampled_from(["", "{}", '{a="b"}', '{a="', "{", '{finished_reason="stop"}', '{err="overloaded"}']),
    st.sampled_from(["1", "NaN", "1e999", "x", "", "gauge", "counter", "1 2 3", "0x1", "\x00"]),
)


@pytest.mark.parametrize("server", BACKENDS)
@FEWER
@given(page=st.lists(LINES, max_size=6).map("\n".join).map(str.encode) | st.binary(max_size=60))
def test_any_page_is_figures_or_a_gap(server: str, page: bytes) -> None:
    """Of a page of metrics."""
    with contextlib.suppress(GapError):
        page_values(parse_page(page, ("vllm:", "tgi_", "lightllm_", "sglang:")), server)
