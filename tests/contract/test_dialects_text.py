"""The text of an answer, as the next turn of a session quotes it: every dialect, every whole transcript."""

from __future__ import annotations

import pytest

from tests.contract.recorded import STREAMS, Stream
from tests.support.dialects import DIALECTS, STREAMED

SAID = {
    "vllm-0.32.0/completion_stream": "lu gikozupipi vajozupipi vajozupipi vajo",
    "vllm-0.32.0/chat_stream": " mitelanidunidunidunidu",
    "vllm-0.32.0/responses_stream": "ranejoruxukidasipohi kakidasipohi ka",
    "vllm-0.32.0/responses_ignore_eos": "qo taxona heditizoreso kaco pocave  xeguxoqa "
    "voqejuja fuwifoje gaha zagi dejabeqe",
    "vllm-0.32.0/messages_stream": "ranejoruxukidasipohi kakidasipohi ka",
    "vllm-0.32.0/messages_system": " nituledonuqitixi mifuvifu xucigebute ludopixa vuzabeqe vozoxema lokivaka cufo",
    "vllm-0.32.0/continuous_usage": " rilo�lu",
    "vllm-0.32.0/token_ids": " rilo�lu",
    "vllm-0.32.0/stream_nousage": " rilo�lu",
    "written/vllm-0.2.0/completions": " Once upon",
    "written/vllm-0.2.0/chat": " Once upon",
    "written/vllm-0.6.6/completions_eos": " Once upon",
    "written/vllm-0.33.0/completions_merged": " Once upon a time",
    "written/vllm-0.33.0/continuous_usage_merged": " Once upon a time",
    "written/vllm-0.33.0/chat_reasoning": "Yes.",
    "written/vllm-0.33.0/chat_tools": "",
    "written/vllm-0.33.0/responses": " Once upon a time",
    "written/vllm-0.33.0/responses_reasoning": "Yes.",
    "written/vllm-0.33.0/responses_tools": "",
    "written/vllm-0.33.0/messages": " Once upon",
    "written/vllm-0.33.0/messages_thinking": "Yes.",
    "written/vllm-0.33.0/messages_tools": "",
    "written/openai/responses_summary": "Yes.",
    "written/openai/responses_filtered": "No",
    "written/anthropic/messages_thinking": "Yes.",
    "written/anthropic/messages_refused": "No",
    "sglang-0.5.23/responses_stream": "rutogimu\0 mizake fako tese",
    "sglang-0.5.23/messages_stream": " tenun degu ciwarizo huke zirozizo",
    "sglang-0.5.23/messages_full_stream": " bunesame wumolojahazicujo",
    "sglang-0.5.23/stream-interval-4/messages_stream": "",
    "sglang-0.5.23/stream-interval-4/responses_stream": "",
    "vllm-0.32.0-whisper/transcription_stream": "pigepigepigepige",
    "vllm-0.32.0-whisper/transcription_stream_nousage": "pigepige",
    "vllm-0.32.0-whisper/transcription_long_stream": "pigepige pigepige",
    "written/openai/transcriptions": " To be",
    "written/openai/transcriptions_done": "To be",
    "written/tgi-1.1.1/generate": " to be",
    "written/tgi-3.3.7/generate": " to be",
    "written/tgi-3.3.7/generate_eos": " to",
    "written/tgi-3.3.7/chat": " to be",
    "written/tgi-2.0.4/chat": " to",
    "written/tgi-3.3.7/completions": " to be",
    "lightllm-0.0.1/stream": " cucoba podo",
    "written/lightllm-2023-09/generate": " to be",
    "written/lightllm-1.2.0/generate": " to be",
    "written/lightllm-1.1.0/chat": " to",
    "written/lightllm-1.2.0/chat": " to be",
    "written/lightllm-1.1.0/completions": " to be",
    "written/lightllm-1.2.0/completions": " to be",
    "written/lightllm-00eb78eb/completions_usage_after_done": " to be",
    "written/openai/chat": "To be",
    "written/transformers-5.19/chat": "To be ",
    "written/transformers-5.19/completions": "To be ",
    "tgi-3.3.7/chat_stream_usage": " gijamivohifawitobu dadupebosu la\x1e",
    "tgi-3.3.7/chat_tool_stream": "",
    "tgi-3.3.7/completions_stream": "rutoebu zihozotivume\ufffdiba",
    "tgi-3.3.7/generate_stream": " kawe puzu\ufffd\ufffdticidivefi wotekapu wotekapu",
    "tgi-3.3.7/generate_stream_details": " kawe puzu\ufffd\ufffdticidivefi wotekapu wotekapu",
    "tgi-3.3.7/generate_grammar_stream": "bab",
    "sglang-0.5.23/chat_stream_cont": " mitela nihi sawapu sawapu sawapu sawapu sawapu mitela",
    "sglang-0.5.23/stream-interval-4/chat_stream_cont": "",
    "sglang-0.5.23/stream-interval-4/chat_stream_usage": "",
    "sglang-0.5.23/completions_stream_usage": " kawe puzu\ufffd\ufffdticidivefi wotekapu wotekapu",
    "sglang-0.5.23/completions_token_ids": " kawe puzu\ufffd",
    "sglang-0.5.23/completions_eos": "",
    "sglang-0.5.23/completions_stream": " kawe puzu\ufffd\ufffdticidivefi wotekapu wotekapu",
    "sglang-0.5.23/generate_ids": "nokagake monidu tuhi vokufune repowapu gegicoma",
    "sglang-0.5.23/generate_stream": " kawe puzu\ufffd\ufffdticidivefi wotekapu wotekapu",
    "sglang-0.5.23/generate_stop_stream": " mopun",
    "sglang-0.5.23/generate_incremental": " kawe puzu\ufffd\ufffdticidivefi wotekapu wotekapu wotekapu",
    "sglang-0.5.23/stream-interval-4/generate_stream": " kawe puzu\ufffd\ufffdticidivefi wotekapu wotekapu",
}
"""Read off the transcripts: reasoning, tool calls and special tokens are no part of it."""
whole_streams = pytest.mark.parametrize(
    "stream",
    [stream for stream in STREAMS if not stream.answer.error_kind],
    ids=lambda stream: stream.file.removesuffix(".txt"),
)


@whole_streams
def test_a_transcript_says_its_text(stream: Stream) -> None:
    """Each whole answer gives the text that the server generated, and nothing else."""
    assert stream.dialect.text(stream.payloads()) == SAID[stream.file.removesuffix(".txt")]


@whole_streams
def test_bytes_that_cannot_be_read_add_nothing(stream: Stream) -> None:
    """Damage at the end never raises, and what was said before it stays."""
    text = stream.dialect.text(stream.payloads())
    for damage in (b"", b"{", b"null", b"[]", b"\xff", b'{"token":null,"choices":null}', b'{"choices":[{}]}'):
        assert stream.dialect.text([*stream.payloads(), damage]) == text


def test_parts_of_content_are_its_text() -> None:
    """Content may be a list of parts. Thinking is left out, as reasoning is."""
    payloads = [
        b'{"choices":[{"delta":{"content":[{"type":"thinking","thinking":[{"type":"text","text":"Let me"}]}]}}]}',
        b'{"choices":[{"delta":{"content":[{"type":"text","text":"It "},"is"]}}]}',
        b'{"choices":[{"delta":{"content":{"type":"text","text":" so"}}}]}',
    ]
    assert DIALECTS["openai", "chat"].text(payloads) == "It is so"


def test_text_that_is_not_cumulative_is_joined() -> None:
    """SGLang's option for incremental output makes each event of /generate contain new text only. Fewer token ids than
    the running total show this."""
    event = b'{"text":"%b","output_ids":[7],"meta_info":{"completion_tokens":%d}}'
    assert DIALECTS["sglang", "generate"].text([event % (b" to", 1), event % (b" to", 2), b"[DONE]"]) == " to to"


def test_a_character_in_two_chunks_is_one() -> None:
    """Some servers split a character into the halves of its surrogate pair."""
    payloads = [b'{"choices":[{"text":"a\\ud83d"}]}', b'{"choices":[{"text":"\\ude00b"}]}']
    assert DIALECTS["openai", "completions"].text(payloads) == "a\U0001f600b"


def test_every_dialect_says_something() -> None:
    """No dialect is without an example."""
    assert {stream.key for stream in STREAMS if SAID.get(stream.file.removesuffix(".txt"))} == set(STREAMED)
