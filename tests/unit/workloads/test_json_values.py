"""Values that a JSON body cannot hold, as users write them: refused with their place and a remedy."""

from __future__ import annotations

import gzip
import json
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.plan_fields import read_plan
from loadgen.workloads import datasets
from loadgen.workloads.json_values import INT_MAX, INT_MIN, check_text, check_value
from loadgen.workloads.spec_syntax import WorkloadError, open_text

HALF = '"\\ud83d"'


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ('{"a": NaN}', "body.a is NaN"),
        ('{"a": [1, {"b": Infinity}]}', "body.a[1].b is Infinity"),
        ('{"a": -Infinity}', "body.a is -Infinity"),
        ('{"a": 1e999}', "body.a is Infinity"),
        ('{"a": -1e999}', "body.a is -Infinity"),
        ('{"seed": 18446744073709551616}', "body.seed is an integer of 65 bits"),
        ('{"seed": -9223372036854775809}', "body.seed is an integer of 64 bits"),
        ('{"stop": ["x", "a\\ud83d"]}', "body.stop[1] cannot be sent: it holds half of a surrogate pair, \\ud83d"),
        ('{"tools": [{"function": {"name": "\\udc00"}}]}', "body.tools[0].function.name cannot be sent"),
        (f'{{"a": {{{HALF}: 1}}}}', "a name in body.a cannot be sent"),
        (f"{{{HALF}: 1}}", "a name in body cannot be sent"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "is nested more than 64 levels deep"),
    ],
)  # fmt: skip
def test_a_value_that_no_body_can_hold_is_refused(written: str, problem: str) -> None:
    """The error names the path of the value and says what to do."""
    with pytest.raises(WorkloadError) as caught:
        check_value(json.loads(written), "body")
    assert problem in str(caught.value)
    assert caught.value.hint


def test_what_is_accepted_can_be_encoded() -> None:
    """Whole characters beyond U+FFFF, NUL, both ends of the integers and of the floats pass, and encode."""
    value: dict[str, Any] = {"text": "\U0001f600\0", "ends": [INT_MIN, INT_MAX, 1.7e308, 5e-324, True, None, ("a",)]}
    check_value(value, "body")
    assert msgspec.json.decode(msgspec.json.encode(value))["ends"][:2] == [INT_MIN, INT_MAX]
    check_text("\U0001f600\0", "prompt")


@pytest.mark.parametrize("value", [{1: 2}, {"a": date(2026, 1, 1)}, {"a": {1, 2}}, {"a": b"x"}])
def test_types_that_json_lacks_are_refused(value: Any) -> None:
    """A date of a plan file, bytes and sets of the Python API, and names that are not text are refused."""
    with pytest.raises(WorkloadError):
        check_value(value, "extra_body")


@pytest.mark.parametrize(
    "written", ['{"a": NaN}', '{"a": {"b": [1e999]}}', '{"stop": "\\ud800"}', '{"seed": 1' + "0" * 30 + "}"]
)
def test_a_plan_refuses_fields_that_cannot_be_sent(written: str) -> None:
    """`--extra-body` is checked as the plan is made; the message names the option and the remedy."""
    with pytest.raises(PlanError, match=r"(?s)--extra-body .*; "):
        Plan(server="vllm", n=1, extra_body=written)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "2026-01-01"])
def test_a_plan_file_refuses_them_too(tmp_path: Path, value: str) -> None:
    """TOML has words for NaN and infinities, and dates."""
    file = tmp_path / "plan.toml"
    file.write_text(f'server = "vllm"\nn = 1\n[extra_body]\ntemperature = {value}\n')
    with pytest.raises(PlanError, match=r"--extra-body .*temperature is"):
        Plan(**read_plan(file))


def test_a_model_name_that_cannot_be_sent_is_refused() -> None:
    """Text of every option must be whole characters."""
    with pytest.raises(PlanError, match=r"--model .*half of a surrogate pair"):
        Plan(server="vllm", n=1, model="a\ud83d")


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("jsonl", b'{"prompt": "a"}\n{"prompt": "cut \\ud83d here"}\n', "line 2: prompt cannot be sent: it holds half"),
        ("jsonl", b'{"prompt": "a"}\n\r\n{"prompt": "\xff"}\r\n', "line 3: the byte 0xff at character 13 is not UTF-8"),
        ("jsonl", b'{"prompt": "\xed\xa0\xbd"}\n', "line 1: the byte 0xed at character 13 is not UTF-8"),
        ("jsonl", b'{"prompt": "a", "body": {"temperature": NaN}}\n', "line 1: body.temperature is NaN"),
        ("jsonl", b'{"prompt": "a", "body": {"x": {"y": 1e999}}}\n', "line 1: body.x.y is Infinity"),
        ("jsonl", b'{"prompt": "a", "image": "https://host/\\ud83d.png"}\n', "line 1: image cannot be sent"),
        (
            "alpaca",
            b'[{"instruction": "a", "output": "b"},\n{"instruction": "a", "input": "\\udc00", "output": "b"}]',
            "element 2: input cannot be sent",
        ),
        ("alpaca", b'[{"instruction": "a\xe9", "output": "b"}]', "element 1: the byte 0xe9 at character 19 is"),
        ("alpaca", b"\x80[]", "the byte 0x80 at character 1 is not UTF-8"),
        (
            "sharegpt",
            b'[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "\\ud83d"}]}]',
            "element 1: conversations[1].value cannot be sent",
        ),
        (
            "sharegpt",
            b'[{"conversations": [{"from": "system", "value": "\\ud83d"}, {"from": "human", "value": "b"}]}]',
            "element 1: conversations[0].value cannot be sent",
        ),
    ],
)  # fmt: skip
def test_a_dataset_with_text_that_cannot_be_sent_is_refused(
    tmp_path: Path, kind: str, content: bytes, problem: str
) -> None:
    """Every reader names the file, the line or element, the field and the character."""
    file = tmp_path / "data"
    file.write_bytes(content)
    with pytest.raises(WorkloadError) as caught:
        list(datasets.SAMPLES[kind](file))
    assert str(caught.value).startswith(str(file))
    assert problem in str(caught.value)
    assert caught.value.hint


def test_text_in_utf8_is_read_as_it_is(tmp_path: Path) -> None:
    """Escaped and plain characters beyond U+FFFF, U+FFFD, NUL and a byte order mark are no damage."""
    file = tmp_path / "data"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "\\ud83d\\ude00 \xf0\x9f\x98\x80 \xef\xbf\xbd \\u0000 x"}\r\n')
    (sample,) = datasets.jsonl(file)
    assert sample.prompt == "\U0001f600 \U0001f600 \ufffd \0 x"


@pytest.mark.parametrize(
    ("begin", "form"),
    [
        (b"\x1f\x8b\x08\0", "cannot be unpacked with gzip"),
        (gzip.compress(b"PAR1 and more", mtime=0), "Parquet"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PAR1", "Parquet"),
        (b"\xff\xfe{\0", "UTF-16"),
        (b"PK\3\4", "ZIP"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, begin: bytes, form: str) -> None:
    """A compressed or binary file is called what it is, with the command that unpacks it."""
    file = tmp_path / "data"
    file.write_bytes(begin + b"rest")
    with pytest.raises(WorkloadError, match=form) as caught, open_text(file, "the dataset"):
        pass
    assert caught.value.hint
