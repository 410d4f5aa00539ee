"""`loadgen burst` against a server that follows OpenAI and says odd things: what terminal and exit code tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, accounted, burst, in_process, summary_of
from tests.support.simulated import running
from tests.support.stub_server import OPENAI, answering
from tests.support.tiny_tokenizers import byte_level_with_bos, save

LENGTH = 4


def stream(words: int, said: dict[str, Any], reason: str = "length") -> bytes:
    """So many chunks, the finish reason, this usage, the end."""
    chunks: list[dict[str, Any]] = [{"choices": [{"text": f" {number}"}]} for number in range(words)]
    chunks.append({"choices": [{"text": "", "finish_reason": reason}], "usage": said})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"


@contextmanager
def saying(answer: Callable[[int], bytes]) -> Iterator[str]:
    """The URL of a server that answers a prompt of so many tokens with these bytes."""
    tokenizer = byte_level_with_bos()
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def completion(body: Any) -> Any:
        tokens = len(tokenizer.encode(body["prompt"]).ids)
        return answer(tokens) if body.get("stream") else {"choices": [{}], "usage": {"prompt_tokens": tokens}}

    with answering(OPENAI | {"POST /v1/completions": completion}) as stub:
        yield stub.url


def asked(folder: Path, url: str, *more: str) -> tuple[int, str, str]:
    file = save("byte_level_with_bos", folder)
    options = ("--tokenizer", str(file), "--input-tokens", "24", "--output-tokens", str(LENGTH), "--n", "3", *more)
    return burst(folder, "--server", "openai", "--url", url, *options)


def test_a_whole_answer_passes(tmp_path: Path) -> None:
    """The length asked for, by the server's count: whether this client is quick enough for it is another matter."""
    with saying(lambda tokens: stream(4, {"prompt_tokens": tokens, "completion_tokens": 4})) as url:
        code, out, err = asked(tmp_path, url)
    assert code in (0, 5), out + err
    assert accounted(tmp_path, 3) == {"complete": 3}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"data: [DONE]\n\n", "truncated", "the response ended without a token"),
        (stream(4, {"completion_tokens": 2}, "stop"), "truncated", "asked for 4 output tokens, got 2 (stop)"),
        (stream(4, {"completion_tokens": 4}, "content_filter"), "truncated", "(content_filter)"),
        (stream(6, {"completion_tokens": 6}), "wrong_length", "asked for 4 output tokens, got 6 (length)"),
        (stream(4, {"completion_tokens": -7}), "protocol", "`int` >= 0"),
        (stream(4, {"completion_tokens": 1e30}), "protocol", "not of this dialect"),
        (stream(4, {"completion_tokens": 2**65}), "protocol", "`int` <= 10000000"),
    ],
)
def test_an_answer_that_proves_nothing_fails_the_run(answer: bytes, kind: str, words: str, tmp_path: Path) -> None:
    """Exit code 1 with the reason, no throughput at the head, and a run file and a page that can be made again."""
    with saying(lambda _: answer) as url:
        code, out, _ = asked(tmp_path, url)
    assert code == 1
    assert "throughput" not in out
    assert "Requests complete" in out
    assert words in " ".join(out.split())
    assert {record.error_kind for record in runfile.read(tmp_path / "run").records} == {kind}
    assert summary_of(tmp_path)["throughput"]["output_tokens_per_s"] is None
    code, _, err = in_process(tmp_path, "report", "run")
    assert code == 0, err


def test_a_gate_sees_short_answers(tmp_path: Path) -> None:
    """`complete` does not hold what the model ended by itself."""
    with saying(lambda tokens: stream(2, {"prompt_tokens": tokens, "completion_tokens": 2}, "stop")) as url:
        code, out, _ = asked(tmp_path, url, "--assert", "complete >= 99.9%")
    assert code == 4, out


def test_a_reason_keeps_its_end(tmp_path: Path) -> None:
    """Of a long one the middle is left out."""
    error = {"error": {"message": "x" * 2_000, "type": "InternalServerError", "code": 500}}
    with saying(lambda _: f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()) as url:
        code, out, _ = asked(tmp_path, url)
    assert code == 1
    assert "(InternalServerError,500)" in "".join(out.split())


def test_a_long_prompt_is_no_fault_of_the_client(tmp_path: Path) -> None:
    """16k tokens of prompt, one request at a time: their ids do not come back, so no read fills the window."""
    with running(SimulatedConfig(server="vllm", max_model_len=20_000, **FAST)) as simulated:
        options = ("--input-tokens", "16k", "--output-tokens", "4", "--n", "3", "--arrivals", "closed:1")
        _, out, _ = burst(tmp_path, "--server", "vllm", "--url", simulated.url, *options, command="run")
    assert "of a full TCP window" not in out
    tokens = summary_of(tmp_path)["tokens"]
    assert (tokens["prompt_reported"], tokens["output_reported"]) == (3 * 16_000, 3 * 4)
    assert summary_of(tmp_path)["client"]["full_reads"] == 0
