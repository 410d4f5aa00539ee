"""The dataset formats, from small samples, read in pieces, and what damage in them is called."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.workloads import datasets, lengths, workload
from loadgen.workloads.datasets import Sample
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.workload import Prompts, WorkloadSpec

SAMPLES = Path(__file__).parents[2] / "data/datasets"
RIVERS = (
    Sample('Name a river, "quoted" [and] {braced}.', "The Elbe."),
    Sample("And another one?", "The Oder, it flows east."),
)
SEA = (Sample("At the sea.", "Which sea?"),)


def test_sharegpt_dialogues_are_read() -> None:
    """Each human turn goes with the answer right after it; dialogues without such a pair are passed over."""
    assert list(datasets.sharegpt(SAMPLES / "sharegpt.json")) == [RIVERS, SEA]


def test_alpaca_instructions_are_read() -> None:
    """The input stands below the instruction; an empty instruction is passed over."""
    assert list(datasets.alpaca(SAMPLES / "alpaca.json")) == [
        Sample("Add the numbers.\n\n2 and 3", "Five."),
        Sample("Greet me.", "Good morning to you."),
    ]


def test_prompts_are_read_line_by_line() -> None:
    """An output length is taken where given; unknown keys and blank lines are no trouble."""
    assert list(datasets.jsonl(SAMPLES / "prompts.jsonl")) == [
        Sample("Count to three.", output_tokens=3),
        Sample("Count to ten."),
    ]


def test_a_prompt_may_bring_fields_of_its_body(tmp_path: Path) -> None:
    """An object under `body`; one that is decided elsewhere, or no object, is an error with its line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Sum up.", "body": {"temperature": 0.7, "guided_json": {"type": "object"}}}\n')
    assert list(datasets.jsonl(file)) == [
        Sample("Sum up.", body={"temperature": 0.7, "guided_json": {"type": "object"}})
    ]
    for body, said in (
        ("[1]", "has a body that is not an object"),
        ('{"max_tokens": 4}', "'max_tokens' cannot be set"),
    ):
        file.write_text(f'{{"prompt": "Sum up.", "body": {body}}}\n')
        with pytest.raises(WorkloadError, match=f"line 1: {said}"):
            list(datasets.jsonl(file))


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name"}, {"type": "text", "text": "a river."}]},
]
HISTORY = (("system", "Be brief."), ("user", "Name\na river."))


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ({"messages": CHAT, "id": 7}, Sample("Name\na river.", messages=HISTORY)),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "The Elbe."}], "max_tokens": 9},
            Sample("Name\na river.", "The Elbe.", 9, messages=HISTORY),
        ),
        (
            {"messages": [{"role": "user", "content": "Hi."}], "output_tokens": 3, "body": {"temperature": 0.5}},
            Sample("Hi.", output_tokens=3, body={"temperature": 0.5}, messages=(("user", "Hi."),)),
        ),
        (
            {
                "custom_id": "a",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": CHAT, "max_completion_tokens": 5, "stream": True, "top_p": 0.9},
            },
            Sample("Name\na river.", output_tokens=5, body={"top_p": 0.9}, messages=HISTORY),
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
                            CHAT[1]["content"][0],
                        ],
                    }
                ]
            },
            Sample("Name", images=("http://a/b.png",), messages=(("user", "Name"),)),
        ),
    ],
)
def test_chat_messages_are_read(tmp_path: Path, line: dict[str, object], sample: Sample) -> None:
    """Lines with OpenAI chat messages: the last message is the prompt, and an answer of the assistant is the recorded
    answer. Lines for the batch API lose the fields that the run decides."""
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert list(datasets.jsonl(file)) == [sample]
    assert sample.uncountable == (len(sample.messages) > 1 or bool(sample.images))


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": " 3 "},
]


def test_messages_with_tool_calls_are_sent_as_they_are(tmp_path: Path) -> None:
    """Tools, tool calls and parts of other types stay in the request, and its model and headers are those of the line.
    A last answer of the assistant is not sent."""
    file = tmp_path / "calls.jsonl"
    answer = {"role": "assistant", "content": "Three."}
    line = {"messages": [*CALLS, answer], "tools": TOOLS, "model": "m", "headers": {"X-A": "b"}, "max_tokens": 7}
    file.write_text(json.dumps(line) + "\n")
    (sample,) = datasets.jsonl(file)
    assert isinstance(sample, Sample)
    assert sample.body == {"tools": TOOLS, "messages": CALLS}
    assert (sample.answer, sample.output_tokens, sample.model, sample.headers) == ("Three.", 7, "m", {"X-A": "b"})
    assert sample.has_messages
    assert sample.uncountable
    request = next(datasets.Dataset("jsonl", file).requests(prompts_of(file)))
    sent = json.loads(BACKENDS["vllm"].dialects["chat"].encode(request, request.model))
    assert (sent["messages"], sent["tools"], sent["model"], sent["max_tokens"]) == (CALLS, TOOLS, "m", 7)


def prompts_of(file: Path) -> Prompts:
    """The prompts of a file, without a tokenizer."""
    spec = WorkloadSpec(datasets.Dataset("jsonl", file), lengths.Fixed(5), None, 0, None)
    return Prompts(spec, lambda *_: "", len, chat=True)


@pytest.mark.parametrize("line", [{"prompt": "  a \n"}, {"messages": [{"role": "user", "content": "  a \n"}]}])
def test_no_blank_is_removed(tmp_path: Path, line: dict[str, object]) -> None:
    """White space around a prompt is a part of it."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(line))
    (sample,) = datasets.jsonl(file)
    assert sample.prompt == "  a \n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "tools that are not a list"),
        ({"model": 3}, "a model that is not text"),
        ({"headers": {"A": 1}}, "headers that are not an object of texts"),
        ({"headers": {"Content-Length": "1"}}, "cannot be set"),
    ],
)
def test_wrong_fields_of_a_line_are_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    """The message names the line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a"} | fields))
    with pytest.raises(WorkloadError, match=f"line 1: .*{message}"):
        list(datasets.jsonl(file))


CONVERSATION = {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]}
INSTRUCTION = {"instruction": "Sing.", "output": "La la."}


@pytest.mark.parametrize("form", ["array", "lines"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("element", "kind", "description"),
    [
        (CONVERSATION, "sharegpt", "ShareGPT conversations"),
        (INSTRUCTION, "alpaca", "Alpaca instructions"),
        ({"prompt": "Hi."}, "jsonl", "prompts"),
        ({"messages": CHAT}, "jsonl", "OpenAI chat messages"),
        ({"body": {"messages": CHAT}}, "jsonl", "OpenAI chat messages"),
    ],
)
def test_a_file_is_recognised_by_its_first_element(
    tmp_path: Path, element: object, kind: str, description: str, packed: bool, form: str
) -> None:
    """Each format may be an array or JSON Lines, and may be compressed with gzip."""
    file = tmp_path / "data.txt"
    text = json.dumps([element] * 3, indent=1) if form == "array" else (json.dumps(element) + "\n") * 3
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    source = workload.parse(str(file))
    assert source == datasets.Dataset(kind, file)
    assert datasets.describe_format(source) == description
    assert len(list(source.samples())) == 3


@pytest.mark.parametrize(
    ("content", "problem", "hint"),
    [
        (b"name,age\n", "line 1: is not JSON", "per line"),
        (b"", "holds no prompts", "per line"),
        (b'{"text": "a"}\n', "unknown format: its first element has 'text'", "per line"),
        (b"[1, 2]", "unknown format: its first element has no fields", "per line"),
        (b"PAR1....", "is a Parquet file", "convert it"),
        ("[]".encode("utf-16"), "is in UTF-16", "iconv"),
        (gzip.compress(b'{"prompt": "a"}\n' * 1000, mtime=0)[:-20], "cannot be unpacked with gzip", "damaged"),
    ],
)
def test_an_unknown_format_is_an_error_that_says_what_to_write(
    tmp_path: Path, content: bytes, problem: str, hint: str
) -> None:
    """A file that is named without a format, and that has none of the known ones."""
    file = tmp_path / "data"
    file.write_bytes(content)
    with pytest.raises(WorkloadError) as caught:
        list(workload.parse(str(file)).samples())  # type: ignore[union-attr]
    assert problem in str(caught.value)
    assert hint in caught.value.hint
    with pytest.raises(WorkloadError, match="cannot read the dataset nowhere"):
        workload.parse("nowhere.json")


def test_a_file_may_be_repeated(tmp_path: Path) -> None:
    """The prompts start again after the last one, and an empty file does not repeat for ever."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    read = datasets.Dataset("jsonl", file).samples
    assert [sample.prompt for sample in islice(datasets.repeated(read, repeat=True), 5)] == [*"ababa"]
    assert [sample.prompt for sample in datasets.repeated(read, repeat=False)] == [*"ab"]
    assert list(datasets.repeated(lambda: iter(()), repeat=True)) == []


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_arrays_are_decoded_wherever_the_reads_split_them(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dialogues do not depend on how many characters are read at a time."""
    monkeypatch.setattr(datasets, "READ_CHARACTERS", size)
    assert list(datasets.sharegpt(SAMPLES / "sharegpt.json")) == [RIVERS, SEA]


def test_the_first_element_is_there_before_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array is not read as a whole: damage far behind does not keep the first element back."""
    monkeypatch.setattr(datasets, "READ_CHARACTERS", 200)
    item = json.dumps({"instruction": "Sing.", "output": "La la."})
    file = tmp_path / "long.json"
    file.write_text("[" + ",\n".join([item] * 100) + ", oops", "utf-8")
    assert next(datasets.alpaca(file)) == Sample("Sing.", "La la.")


def test_an_element_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that never ends its first element does not fill the memory."""
    monkeypatch.setattr(datasets, "READ_CHARACTERS", 100)
    monkeypatch.setattr(datasets, "ELEMENT_LIMIT", 1000)
    file = tmp_path / "endless.json"
    file.write_text('["' + "x" * 10_000, "utf-8")
    with pytest.raises(WorkloadError, match="element 1: is longer than 1000 characters"):
        list(datasets.alpaca(file))


@pytest.mark.parametrize(
    ("read", "content", "problem"),
    [
        (datasets.alpaca, "hello", "line 1: is not JSON"),
        (datasets.alpaca, '{"instruction": 1}', "line 1: expected text, found 1"),
        (datasets.alpaca, '[{"instruction": "a", "output": "b"}', "element 1: is not followed by a comma"),
        (datasets.alpaca, '[{"instruction": "a", "output": "b"} {}]', "element 1: is not followed by a comma"),
        (datasets.alpaca, '[{"instruction": "a", "output": "b"}, {"inst', "element 2: is not JSON"),
        (datasets.alpaca, '[{"instruction": "a"}]', "element 1: has no 'output'"),
        (datasets.alpaca, '[{"instruction": 5, "output": "b"}]', "element 1: expected text, found 5"),
        (datasets.alpaca, "[3]", "element 1: "),
        (datasets.alpaca, "[" * 200_000, "element 1: is not JSON"),
        (datasets.sharegpt, '[{"id": 1}]', "element 1: has no 'conversations'"),
        (datasets.sharegpt, '[{"conversations": "hello"}]', "element 1: its conversations are not a list"),
        (datasets.sharegpt, '[{"conversations": [{"from": "human"}]}]', "element 1: has no 'value'"),
        (datasets.jsonl, '{"prompt": "a"}\n{"prompt": ""}\n', "line 2: its prompt is empty"),
        (datasets.jsonl, '{"prompt": "a"}\n{"prompt": "b"\n', "line 2: is not JSON"),
        (datasets.jsonl, '{"text": "a"}\n', "line 1: has no 'prompt'"),
        (datasets.jsonl, '"a"\n', "line 1: "),
        (datasets.jsonl, '{"prompt": "a", "output_tokens": 0}\n', "line 1: output_tokens 0 is not"),
        (datasets.jsonl, '{"messages": []}\n', "line 1: its messages are not a list of at least one message"),
        (datasets.jsonl, '{"messages": [{"content": "a"}]}\n', "line 1: has no 'role'"),
        (
            datasets.jsonl,
            '{"messages": [{"role": "user", "content": null}]}\n',
            "messages[0] has no text that can be sent",
        ),
        (datasets.jsonl, '{"messages": [{"role": "user", "content": ""}]}\n', "line 1: its last message has no text"),
        (
            datasets.jsonl,
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "cut \\ud83d"}]}\n',
            "line 1: messages[1].content",
        ),
        (datasets.jsonl, '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}\n', "max_tokens 0 is not"),
        (datasets.jsonl, '{"prompt": "a", "output_tokens": true}\n', "line 1: output_tokens True is not"),
    ],
)
def test_damage_is_an_error_with_its_place(
    tmp_path: Path, read: Callable[[Path], Iterator[object]], content: str, problem: str
) -> None:
    """What does not fit the format is never guessed at: the error names file, place and reason."""
    file = tmp_path / "data"
    file.write_text(content, "utf-8")
    with pytest.raises(WorkloadError) as caught:
        list(read(file))
    assert problem in str(caught.value)
    assert str(file) in str(caught.value)


def test_an_empty_array_holds_nothing(tmp_path: Path) -> None:
    """`[ ]` is a dataset without elements, not damage."""
    file = tmp_path / "empty.json"
    file.write_text(" [ ]\n", "utf-8")
    assert list(datasets.alpaca(file)) == []


@pytest.mark.parametrize("read", [datasets.sharegpt, datasets.alpaca, datasets.jsonl])
def test_a_missing_file_is_an_error(tmp_path: Path, read: Callable[[Path], Iterator[object]]) -> None:
    """A file that cannot be read is named together with the system's reason."""
    with pytest.raises(WorkloadError, match=r"cannot read the dataset .*nowhere: No such file"):
        list(read(tmp_path / "nowhere"))
