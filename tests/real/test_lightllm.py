"""The burst against LightLLM's own front end: the judge of the LightLLM dialect."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.analysis.run import runfile

if TYPE_CHECKING:
    from tests.real.conftest import Burst, Engine

N, INPUT_TOKENS, OUTPUT_TOKENS = 100, 512, 32
SIZE = ("--input-tokens", INPUT_TOKENS, "--output-tokens", OUTPUT_TOKENS)


def test_a_hundred_at_once_all_complete(lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path) -> None:
    """100 x (512 in, 32 out): all complete, each with 32 tokens by LightLLM's count and in 32 chunks of ours."""
    outcome = burst(lightllm, tmp_path / "run", *SIZE, "--n", N, "--seed", 1, "--tokenizer", tokenizer)
    outcome.check_all_complete(N)
    records = runfile.read(outcome.folder).records
    assert [record.output_tokens for record in records] == [OUTPUT_TOKENS] * N
    assert [sum(record.chunk_tokens) for record in records] == [OUTPUT_TOKENS] * N


def test_prompts_are_exact_by_lightllms_own_count(
    lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path
) -> None:
    """A burst of 100 adds 99 requests and 99 x 512 prompt tokens more to its histogram of lengths than a burst of one.

    Streams of this version do not say how long the prompt was; the histogram does. Both bursts first have two texts
    counted, which this version can only do by running them: the difference is without those.
    """
    requests, tokens = "lightllm_request_input_length_count", "lightllm_request_input_length_sum"
    readings = [lightllm.counters()]
    for n in (1, N):
        outcome = burst(lightllm, tmp_path / str(n), *SIZE, "--n", n, "--seed", 2, "--tokenizer", tokenizer)
        outcome.check_all_complete(n)
        readings.append(lightllm.counters())
    gained = [{name: after[name] - before[name] for name in (requests, tokens)} for before, after in pairwise(readings)]
    assert gained[1][requests] - gained[0][requests] == N - 1
    assert gained[1][tokens] - gained[0][tokens] == (N - 1) * INPUT_TOKENS


def test_what_the_run_read_of_lightllm_agrees_with_the_client(
    lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path
) -> None:
    """Its page has no content type and its KV cache is elsewhere; both are read, and the counts are the client's."""
    outcome = burst(lightllm, tmp_path / "run", *SIZE, "--n", N, "--seed", 4, "--tokenizer", tokenizer)
    outcome.check_all_complete(N)
    counts = {word: (entry["server"], entry["agree"]) for word, entry in outcome.summary["server_counters"].items()}
    assert counts["prompt_tokens"] == (N * INPUT_TOKENS, True)
    assert counts["output_tokens"] == (N * OUTPUT_TOKENS, True)
    assert counts["requests_finished"] == (N, True)
    assert outcome.summary["memory"]["kv_cache"]["idle_share"] is not None
    assert "server" not in outcome.summary["memory"]["gaps"]


def test_a_request_it_finds_too_long_fails_clearly(
    lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path
) -> None:
    """It answers a too long stream with 200, no event and a cut connection: failed, exit code 1, and explained."""
    options = ("--n", 3, "--input-tokens", 1600, "--output-tokens", 8, "--tokenizer", tokenizer)
    outcome = burst(lightllm, tmp_path / "run", *options)
    assert outcome.exit_code == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    requests = outcome.summary["requests"]
    assert (requests["sent"], requests["complete"]) == (3, 0)
    assert requests["truncated"] + requests["failed"] == 3
    assert all(record.error_detail for record in runfile.read(outcome.folder).records)


def test_its_broken_chat_is_reported_as_its_error(
    lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path
) -> None:
    """Its version is refused on this endpoint, which answers 500 to everything: found out, and said, when forced."""
    options = ("--n", 4, "--input-tokens", 64, "--output-tokens", 8, "--tokenizer", tokenizer)
    refused = burst(lightllm, tmp_path / "run", "--endpoint", "chat", *options)
    assert refused.exit_code == 2
    assert "misleading figures on chat" in refused.stderr
    outcome = burst(lightllm, tmp_path / "run", "--endpoint", "chat", "--force", *options)
    assert outcome.exit_code == 1
    assert {record.http_status for record in outcome.records} == {500}
    assert "/v1/chat/completions answers 500" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_its_version_is_not_overstated(lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path) -> None:
    """It states no version, and has no route that came with 1.0: the summary says as much."""
    outcome = burst(lightllm, tmp_path / "run", *SIZE, "--n", 1, "--seed", 3, "--tokenizer", tokenizer)
    assert (outcome.summary["server"]["name"], outcome.summary["server"]["version"]) == ("lightllm", "before 1.0")


def test_answers_may_end(lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path) -> None:
    """Some of its random tokens end an answer before its limit; all are complete, and each token is in its counter."""
    options = ("--n", 50, "--input-tokens", 64, "--output-tokens", "max:256", "--tokenizer", tokenizer)
    outcome = burst(lightllm, tmp_path / "run", *options)
    outcome.check_all_complete(50)
    lengths = [record.output_tokens or 0 for record in outcome.records]
    assert min(lengths) < max(lengths) == 256
    assert outcome.summary["server_counters"]["output_tokens"]["server"] == sum(lengths)


def test_fields_of_the_user_reach_it(lightllm: Engine, burst: Burst, tokenizer: Path, tmp_path: Path) -> None:
    """It reads them where it reads its own: a temperature that it refuses is refused, a good one is not."""
    options = ("--n", 3, "--input-tokens", 64, "--output-tokens", 8, "--tokenizer", tokenizer, "--extra-body")
    burst(lightllm, tmp_path / "run", *options, '{"temperature": 0.7}').check_all_complete(3)
    refused = burst(lightllm, tmp_path / "refused", *options, '{"temperature": -1}')
    assert refused.exit_code == 1
    assert {record.error_detail for record in refused.records} == {"temperature must > 0.0, got -1"}


def test_a_file_says_how_long_answers_are(lightllm: Engine, burst: Burst, tmp_path: Path) -> None:
    """Without a tokenizer, as its prompts go as they are; a line without a length asks for 128."""
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "One.", "output_tokens": 5}\n{"prompt": "Two."}\n')
    outcome = burst(lightllm, tmp_path / "run", "--n", 2, "--workload", f"jsonl:{file}")
    outcome.check_all_complete(2)
    assert [record.output_tokens for record in outcome.records] == [5, 128]


def test_lengths_without_a_tokenizer(lightllm: Engine, burst: Burst, tmp_path: Path) -> None:
    """Exact ones are refused with what to do; by default samples are run to count them."""
    options = ("--n", 10, "--input-tokens", 64, "--output-tokens", 8)
    refused = burst(lightllm, tmp_path / "run", *options, "--lengths", "exact")
    assert refused.exit_code == 2
    assert "--lengths exact" in refused.stderr
    outcome = burst(lightllm, tmp_path / "run", *options)
    outcome.check_all_complete(10)
    assert outcome.summary["server_counters"]["prompt_tokens"]["server"] == 640
