"""Clients that nobody here wrote work against the simulated servers unchanged: `openai` and `text-generation`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.dialects import STREAMING_BACKENDS
from tests.support.simulated import Running, running

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.xdist_group("clients")  # importing the clients takes a second, so one process does it
# Of text-generation 0.7.0, which calls pydantic the old way.
old_client = pytest.mark.filterwarnings("ignore:The `(dict|parse_obj)` method is deprecated")

MESSAGES = [{"role": "user", "content": "say something"}]


@pytest.fixture(scope="module", params=STREAMING_BACKENDS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Each of the three, fast."""
    with running(SimulatedConfig(server=request.param, model="m", ttft_s=0.005, itl_s=0.0005)) as started:
        yield started


def open_client(url: str) -> openai.OpenAI:
    """Return the OpenAI client as anybody would make it, for the routes below `url`."""
    import openai

    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def text_generation() -> Any:
    """The package of that name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's, about a namespace that the old client uses
        import text_generation
    return text_generation


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The OpenAI client of one of these servers."""
    with open_client(f"{server.url}/v1") as made:
        yield made


def test_openai_lists_the_model(client: openai.OpenAI) -> None:
    """GET /v1/models names the one model."""
    assert [model.id for model in client.models.list()] == ["m"]


def test_openai_completions_whole(client: openai.OpenAI) -> None:
    """One answer of the length asked, with its counts."""
    answer = client.completions.create(model="m", prompt="once upon a time", max_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert len(answer.choices[0].text.split()) == 12


def test_openai_completions_streamed(client: openai.OpenAI) -> None:
    """The pieces add up to the whole answer's length, and usage comes once."""
    usage = {"include_usage": True}
    chunks = list(
        client.completions.create(model="m", prompt="once upon", max_tokens=7, stream=True, stream_options=usage)
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert len(text.split()) == 7
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [7]


def test_openai_chat_whole(client: openai.OpenAI) -> None:
    """A message from the assistant, of the length asked."""
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=9)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert len((message.content or "").split()) == 9
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9


def test_openai_chat_streamed(client: openai.OpenAI) -> None:
    """Role first, then words, then the reason for the end, then usage."""
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=5, stream=True, stream_options=options)
    )
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert len("".join(choice.delta.content or "" for choice in deltas).split()) == 5
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [5]


@pytest.fixture
def vllm() -> Iterator[openai.OpenAI]:
    """The OpenAI client of a simulated vLLM, the one with the Responses API."""
    with (
        running(SimulatedConfig(server="vllm", model="m", ttft_s=0.005, itl_s=0.0005)) as started,
        open_client(f"{started.url}/v1") as made,
    ):
        yield made


def test_openai_responses_whole(vllm: openai.OpenAI) -> None:
    """One message of the length asked, with its counts, and incomplete because of its limit."""
    answer = vllm.responses.create(model="m", input="say something", max_output_tokens=9)
    assert (answer.status, len(answer.output_text.split())) == ("incomplete", 9)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + 9


def test_openai_responses_streamed(vllm: openai.OpenAI) -> None:
    """Every event is one that the client knows, numbered in order. The pieces add up to the text of the last event."""
    events = list(vllm.responses.create(model="m", input="say something", max_output_tokens=5, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "".join(pieces)
    assert len(pieces) == 5
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 5


def test_openai_sees_errors_as_errors() -> None:
    """A prompt that does not fit is an error of the class that the status stands for."""
    import openai

    for name, error in (("vllm", openai.BadRequestError), ("tgi", openai.UnprocessableEntityError)):
        with (
            running(SimulatedConfig(server=name, model="m", max_model_len=64, ttft_s=0)) as started,
            open_client(f"{started.url}/v1") as client,
            pytest.raises(error),
        ):
            client.completions.create(model="m", prompt="word " * 100, max_tokens=8)


@pytest.fixture(scope="module")
def tgi() -> Iterator[Running]:
    """TGI that takes two requests at a time."""
    config = SimulatedConfig(server="tgi", ttft_s=0.005, itl_s=0.0005, max_concurrent_requests=2, max_model_len=128)
    with running(config) as started:
        yield started


@old_client
def test_text_generation_whole(tgi: Running, text_generation: Any) -> None:
    """The synchronous client gets details with one entry per token."""
    answer = text_generation.Client(tgi.url).generate("hello world", max_new_tokens=6)
    assert answer.details.generated_tokens == 6
    assert answer.details.finish_reason == "length"
    assert answer.generated_text == "".join(token.text for token in answer.details.tokens)


@old_client
async def test_text_generation_streamed(tgi: Running, text_generation: Any) -> None:
    """The asynchronous client gets one response per token, and the whole text with the last."""
    stream = text_generation.AsyncClient(tgi.url).generate_stream("hello world", max_new_tokens=6)
    responses = [response async for response in stream]
    assert len(responses) == 6
    assert responses[-1].generated_text == "".join(response.token.text for response in responses)
    assert responses[-1].details is not None
    assert responses[-1].details.generated_tokens == 6


@old_client
def test_text_generation_sees_refusals(tgi: Running, text_generation: Any) -> None:
    """A prompt over the limit is a validation error in TGI's words, in the stream too."""
    client = text_generation.Client(tgi.url)
    with pytest.raises(text_generation.errors.ValidationError, match="must be <= 128"):
        client.generate("word " * 150, max_new_tokens=6)
    with pytest.raises(text_generation.errors.ValidationError, match="must be <= 128"):
        list(client.generate_stream("word " * 150, max_new_tokens=6))


@old_client
async def test_text_generation_sees_overload(text_generation: Any) -> None:
    """The third of three requests at a time is refused: 200 and an error event."""
    with running(SimulatedConfig(server="tgi", ttft_s=0.005, itl_s=0.3, max_concurrent_requests=2)) as slow:
        client = text_generation.AsyncClient(slow.url)
        first, second = (client.generate_stream("a", max_new_tokens=10) for _ in range(2))
        await anext(first)
        await anext(second)
        with pytest.raises(text_generation.errors.OverloadedError):
            await anext(client.generate_stream("a", max_new_tokens=1))
        assert len([response async for response in first]) + len([response async for response in second]) == 18


METRICS = {
    "vllm": ("vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds"),
    "tgi": ("tgi_request_generated_tokens", "tgi_request_success", "tgi_request_duration"),
    "lightllm": (
        "lightllm_generation_tokens",
        "lightllm_request_success",
        "lightllm_request_first_token_duration",
    ),
    "sglang": ("sglang:generation_tokens", "sglang:num_requests", "sglang:time_to_first_token_seconds"),
}


@pytest.mark.parametrize("name", STREAMING_BACKENDS)
def test_metrics_count_what_happened(name: str) -> None:
    """An independent parser reads the page, and its totals are those of the answers."""
    config = SimulatedConfig(server=name, model="m", ttft_s=0.002, itl_s=0.0002)
    with running(config) as started, open_client(f"{started.url}/v1") as client:
        for length in (3, 4, 5):
            client.completions.create(model="m", prompt="hello", max_tokens=length)
        page = client.with_options(base_url=started.url).get("/metrics", cast_to=str)
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "le" not in sample.labels and sample.labels.get("finished_reason", "length") == "length"
    }
    tokens, success, latency = METRICS[name]
    assert samples.get(f"{tokens}_total", samples.get(f"{tokens}_sum")) == 12
    assert samples.get(f"{success}_total", samples.get(success)) == 3
    assert samples[f"{latency}_count"] == 3
    assert samples[f"{latency}_sum"] >= 3 * 0.002
