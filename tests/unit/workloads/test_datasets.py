"""The dataset formats, from small samples, read in pieces, and what damage in them is called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadgen.workloads import datasets
from loadgen.workloads.datasets import Sample
from loadgen.workloads.spec_syntax import WorkloadError

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
        (datasets.alpaca, "", "is not a JSON array"),
        (datasets.alpaca, '{"instruction": 1}', "is not a JSON array"),
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
