"""A burst at versions of servers that are known to mislead: refused with a reason, unless forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loadgen.analysis.run import runfile
from tests.support.command import ROOT, burst
from tests.support.stub_server import LIGHTLLM_1_1, VLLM_0_2, Answer, answering
from tests.support.tiny_tokenizers import save

WRITTEN = ROOT / "tests" / "contract" / "transcripts" / "written"
SIZE = ("--endpoint", "chat", "--n", "2", "--input-tokens", "8", "--output-tokens", "3", "--no-report")


def chat(transcript: str, tokenizer: Path) -> Answer:
    """A chat endpoint that counts tokens when asked for a whole answer, and streams a transcript otherwise."""
    counting = Tokenizer.from_file(str(tokenizer))
    text = (WRITTEN / transcript).read_bytes()

    def answer(body: Any) -> Any:
        if body.get("stream"):
            return text
        return {"usage": {"prompt_tokens": len(counting.encode(body["messages"][0]["content"]).ids) + 1}}

    return answer


def test_a_version_that_misleads_is_refused_unless_forced(tmp_path: Path) -> None:
    """Exit code 2, nothing sent, the native endpoint named; with --force it is measured, and the run says so."""
    tokenizer = save("byte_level", tmp_path)
    reason = "LightLLM 1.1.0 have no end marker"
    with answering(LIGHTLLM_1_1 | {"POST /v1/chat/completions": chat("lightllm-1.1.0/chat.txt", tokenizer)}) as stub:
        named = ("--server", "lightllm", "--url", stub.url, "--tokenizer", str(tokenizer), *SIZE)
        code, out, err = burst(tmp_path, *named)
        assert code == 2
        assert reason in err
        assert "--endpoint" in err
        assert "--force" in err
        assert "POST /v1/chat/completions" not in stub.heard
        assert not (tmp_path / "run").exists()
        code, out, err = burst(tmp_path, *named, "--force")
    assert "FORCED" in out, err
    run = runfile.read(tmp_path / "run")
    assert run.header.plan["force"]
    assert reason in run.header.client["forced"]
    assert "Measured with --force: " in " ".join(out.split())
    assert [sum(record.chunk_tokens) for record in run.records] == [3] * 2


def test_a_version_that_is_unknown_is_measured_with_a_word(tmp_path: Path) -> None:
    """A gateway that publishes only the OpenAI routes hides the version of vLLM, so nothing is refused or forced."""
    tokenizer = save("byte_level", tmp_path)
    with answering(VLLM_0_2 | {"POST /v1/chat/completions": chat("vllm-0.2.0/chat.txt", tokenizer)}) as stub:
        named = ("--server", "vllm", "--url", stub.url, "--tokenizer", str(tokenizer), *SIZE)
        _, out, err = burst(tmp_path, *named)
    assert out.count("its version is unknown") == 1, err
    run = runfile.read(tmp_path / "run")
    assert "forced" not in run.header.client
    assert [sum(record.chunk_tokens) for record in run.records] == [2] * 2
