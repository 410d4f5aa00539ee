"""A burst at versions of servers that are known to mislead: refused with a reason, unless forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("server", "routes", "transcript", "reason", "tokens"),
    [
        ("vllm", VLLM_0_2, "vllm-0.2.0/chat.txt", "sent before the engine starts", 2),
        (
            "lightllm",
            LIGHTLLM_1_1,
            "lightllm-1.1.0/chat.txt",
            "LightLLM 1.1.0 have no end marker",
            3,
        ),
    ],
)
def test_a_version_that_misleads_is_refused_unless_forced(
    tmp_path: Path, server: str, routes: dict[str, Answer], transcript: str, reason: str, tokens: int
) -> None:
    """Exit code 2, nothing sent, the native endpoint named; with --force it is measured, and the run says so."""
    tokenizer = save("byte_level", tmp_path)
    with answering(routes | {"POST /v1/chat/completions": chat(transcript, tokenizer)}) as stub:
        named = ("--server", server, "--url", stub.url, "--tokenizer", str(tokenizer), *SIZE)
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
    assert [sum(record.chunk_tokens) for record in run.records] == [tokens] * 2
