"""A dialect as a version of its server speaks it, and the versions that must not be measured on it."""

from __future__ import annotations

import pytest

from loadgen.servers.backends.dialect import Dialect
from tests.contract.recorded import STREAMS, Stream
from tests.support.dialects import DIALECTS

VERSIONS = {
    "tgi-1.1.1": "1.1.1",
    "tgi-2.0.4": "2.0.4",
    "tgi-3.3.7": "3.3.6-dev0 (sha-dfb3fbe)",
    "lightllm-0.0.1": "before 1.0",
    "lightllm-2023-09": "before 1.0",
    "lightllm-00eb78eb": "1.2.0 or later",
    "lightllm-1.1.0": "1.1.0",
    "lightllm-1.2.0": "1.2.0 or later",
    "vllm-0.2.0": "",
    "vllm-0.6.6": "0.6.6.post1",
    "vllm-0.32.0": "0.32.0",
    "vllm-0.33.0": "0.33.0",
    "openai": "",
    "anthropic": "",
    "sglang-0.5.23": "0.5.23",
    "transformers-5.19": "",
}
"""Folder of transcripts to the version that the probe finds."""


def version_of(stream: Stream) -> str:
    return VERSIONS[stream.file.removeprefix("written/").partition("/")[0].removesuffix("-whisper")]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.file.removesuffix(".txt"))
def test_a_variant_reads_its_own_version_as_the_dialect_does(stream: Stream) -> None:
    """Knowing the version changes nothing about what is whole, or how many tokens it holds."""
    assert stream.dialect.variant(version_of(stream)).decode(stream.payloads()) == stream.answer


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_new_tgi_owes_an_end_marker(endpoint: str) -> None:
    """From 2.2.0 on a stream that ends after its finish reason was cut short; before, that is all there is."""
    payloads = [
        b'{"choices":[{"index":0,"text":" a","delta":{"role":"assistant","content":" a"},"finish_reason":null}]}',
        b'{"choices":[{"index":0,"text":" b","delta":{"role":"assistant","content":" b"},"finish_reason":"length"}]}',
    ]
    dialect = DIALECTS["tgi", endpoint]
    ends = {
        version: dialect.variant(version).decode(payloads).end_event for version in ("2.1.1", "2.2.0", "3.3.6-dev0")
    }
    assert ends == {"2.1.1": 1, "2.2.0": None, "3.3.6-dev0": None}
    assert dialect.variant("3.3.6-dev0").decode([*payloads, b"[DONE]"]).end_event == 2


def test_old_lightllm_chat_counts_every_chunk() -> None:
    """Up to 1.1.0 each chunk is a token, an empty one with a role too, even where only one came before the cut."""
    payloads = [b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}']
    chat = DIALECTS["lightllm", "chat"]
    assert chat.variant("1.1.0").decode(payloads).tokens == [1]
    assert chat.variant("1.2.0 or later").decode(payloads).tokens == [0]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: f"{dialect.server}-{dialect.endpoint}")
@pytest.mark.parametrize("version", ["", *dict.fromkeys(VERSIONS.values())])
def test_only_what_is_known_to_mislead_is_refused(dialect: Dialect, version: str) -> None:
    """LightLLM's chat up to 1.1.0, with a reason. vLLM's chat where it states no version gets a caution."""
    refused = {("lightllm", old) for old in ("before 1.0", "1.0", "1.1.0")}
    is_chat = dialect.endpoint == "chat"
    assert bool(dialect.misleading_reason(version)) == (is_chat and (dialect.server, version) in refused)
    assert bool(dialect.caution(version)) == (is_chat and (dialect.server, version) == ("vllm", ""))
