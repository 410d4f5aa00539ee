"""The first commands of people who come from other load testers, on six types of servers.

Each row of the table is a command as its tool's documentation has it, with only the name of the tool replaced or kept
as a subcommand. Requests are fewer and runs shorter than in the original. A command either measures at once, or is
refused with a complete command that measures when it is pasted.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support import small_servers
from tests.support.command import FAST, loadgen
from tests.support.simulated import running
from tests.support.small_servers import small_server

CHAT_BODY = """'{"model": "{model}", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'"""
TEXT_BODY = """'{"model": "{model}", "prompt": "Say hello", "max_tokens": 8, "stream": true}'"""
TGI_BODY = """'{"inputs": "Say hello", "parameters": {"max_new_tokens": 8}}'"""
COMMANDS = [
    # vllm bench serve
    (
        "vllm",
        "bench serve --backend vllm --base-url {url} --model {model} --endpoint /v1/completions --dataset-name random "
        "--random-input-len 128 --random-output-len 16 --num-prompts 20",
    ),
    (
        "chat-only",
        "vllm bench serve --backend openai-chat --base-url {url} --model my-model --endpoint /v1/chat/completions "
        "--dataset-name random --random-input-len 64 --random-output-len 8 --num-prompts 10 --max-concurrency 4",
    ),
    (
        "sglang",
        "vllm bench serve --host {host} --port {port} --model {model} --dataset-name sharegpt "
        "--dataset-path sharegpt.json --num-prompts 4 --request-rate 20",
    ),
    (
        "lightllm",
        "bench serve --base-url {url} --model {model} --request-rate inf --num-prompts 20 --random-input-len 64 "
        "--random-output-len 8 --ignore-eos --percentile-metrics ttft,tpot,itl,e2el --save-result",
    ),
    (
        "llama.cpp",
        "bench serve --backend openai --base-url {url} --endpoint /v1/completions --model {model} --request-rate 20 "
        "--burstiness 0.5 --max-concurrency 4 --num-prompts 20 --seed 42 --random-output-len 8 "
        "--tokenizer meta-llama/Llama-3.1-8B-Instruct",
    ),
    (
        "tgi",
        "vllm bench serve --backend tgi --endpoint /generate_stream --base-url {url} --model {model} "
        "--dataset-name random --random-input-len 64 --random-output-len 8 --num-prompts 20",
    ),
    # GuideLLM
    (
        "slow vllm",
        "guidellm benchmark --target {url} --rate-type sweep --max-seconds 1 --data 'prompt_tokens=64,output_tokens=8'",
    ),
    (
        "chat-only",
        "guidellm benchmark --target {url} --profile concurrent --rate 4 --max-requests 20 "
        "--data 'prompt_tokens=64,output_tokens=8'",
    ),
    (
        "llama.cpp",
        "guidellm benchmark run --target {url} --rate-type synchronous --max-requests 5 "
        """--data '{"prompt_tokens": 64, "output_tokens": 8}'""",
    ),
    (
        "tgi",
        "benchmark --target {url} --rate-type constant --rate 10 --max-seconds 1 "
        "--data prompt_tokens=256,prompt_tokens_stdev=32,output_tokens=16 --outputs json",
    ),
    (
        "sglang",
        "guidellm benchmark run --target {url}/v1 --profile poisson --rate 10 --max-seconds 1 "
        "--output-path results.json --data prompt_tokens=64,output_tokens=8",
    ),
    (
        "vllm",
        "run --target {url} --rate-type throughput --max-requests 20 --data prompt_tokens=64,output_tokens=8 "
        "--processor {model}",
    ),
    # AIPerf and its predecessor GenAI-Perf
    (
        "vllm",
        "aiperf profile --model {model} --url localhost:{port} --endpoint-type chat --streaming --concurrency 4 "
        "--request-count 20",
    ),
    (
        "chat-only",
        "profile --model my-model --url {url} --endpoint-type chat --streaming --concurrency 2 --request-count 10 "
        "--isl 64 --osl 8",
    ),
    (
        "sglang",
        "aiperf profile -m {model} -u {host}:{port} --endpoint-type completions --streaming --request-rate 20 "
        "--request-count 20 --synthetic-input-tokens-mean 128 --synthetic-input-tokens-stddev 0 "
        "--output-tokens-mean 8 --output-tokens-stddev 0 --random-seed 123 --tokenizer Qwen/Qwen3-0.6B "
        "--profile-export-file my_profile_export.json",
    ),
    (
        "lightllm",
        "aiperf profile --model {model} --url {url} --endpoint /v1/chat/completions --endpoint-type chat "
        "--streaming --concurrency 4 --benchmark-duration 1 --osl 8 --artifact-dir artifacts --ui simple",
    ),
    (
        "llama.cpp",
        "genai-perf profile -m {model} --service-kind openai --endpoint-type chat --url {host}:{port} --streaming "
        "--concurrency 1 --synthetic-input-tokens-mean 64 --synthetic-input-tokens-stddev 0 --output-tokens-mean 8 "
        "--output-tokens-stddev 0 --extra-inputs min_tokens:8 --extra-inputs ignore_eos:true --request-count 10 "
        "--tokenizer hf-internal-testing/llama-tokenizer --measurement-interval 4000 -- -v --max-threads=256",
    ),
    # k6
    ("vllm", "k6 run --vus 4 --duration 1s script.js --url {url}"),
    ("chat-only", "run --vus 2 --iterations 10 --url {url}"),
    ("tgi", "k6 run -u 4 -i 10 --url {url} -e MODEL={model}"),
    ("sglang", "run --stage 1s:2,500ms:4 --url {url} --summary-trend-stats 'avg,p(99)'"),
    # Locust
    ("vllm", "locust -f locustfile.py --headless -u 4 -r 2 -t 1s --host {url}"),
    ("llama.cpp", "locust --headless --users 4 --spawn-rate 2 --run-time 1 -H {url} --only-summary"),
    ("lightllm", "run --users 4 --run-time 1s --host {url} --autoquit 3"),
    # oha
    (
        "vllm",
        "oha -n 20 -c 4 -m POST -H 'Content-Type: application/json' -d " + CHAT_BODY + " {url}/v1/chat/completions",
    ),
    (
        "chat-only",
        "oha -z 1s -q 10 -c 4 --no-tui --latency-correction -m POST -T application/json -d "
        + CHAT_BODY
        + " {url}/v1/chat/completions",
    ),
    ("tgi", "oha -z 1s -c 4 --no-tui -m POST -T application/json -d " + TGI_BODY + " {url}/generate_stream"),
    # vegeta
    (
        "vllm",
        "vegeta attack -rate=10/s -duration=1s -method=POST -body=body.json -header 'Content-Type: application/json' "
        "{url}/v1/completions",
    ),
    ("lightllm", "attack -rate 10 -duration 1s -max-workers=4 -timeout 30s -targets=targets.txt -url {url}"),
    ("sglang", "attack -rate=0 -max-workers=4 -duration=1s --url {url}"),
    # hey, wrk and ab
    ("vllm", "hey -n 20 -c 4 -m POST -T application/json -d " + TEXT_BODY + " {url}/v1/completions"),
    ("llama.cpp", "hey -z 1s -c 4 -q 5 -m POST -D body.json {url}/v1/completions"),
    ("chat-only", "hey -n 20 -c 4 {url}"),
    ("vllm", "wrk -t2 -c4 -d1s --latency {url}"),
    ("tgi", "ab -n 20 -c 4 -p body.json -T application/json {url}/generate_stream"),
    # LLMPerf, inference-perf, sglang.bench_serving, EvalScope, genai-bench
    (
        "chat-only",
        "token_benchmark_ray.py --model my-model --mean-input-tokens 64 --stddev-input-tokens 16 "
        "--mean-output-tokens 8 --stddev-output-tokens 2 --max-num-completed-requests 10 --timeout 600 "
        "--num-concurrent-requests 2 --results-dir results --llm-api openai --additional-sampling-params '{}' "
        "--url {url}",
    ),
    (
        "vllm",
        "inference-perf --server.type vllm --server.base_url {url} --server.model_name {model} --load.type constant "
        """--load.stages '[{"rate": 10, "duration": 1}]' --api.type completion --api.streaming true """
        "--data.type random --data.input_distribution.mean 64 --data.output_distribution.mean 8",
    ),
    (
        "sglang",
        "sglang.bench_serving --backend sglang --host {host} --port {port} --dataset-name random --random-input 64 "
        "--random-output 8 --random-range-ratio 0.5 --num-prompts 20",
    ),
    (
        "chat-only",
        "evalscope perf --parallel 2 --number 10 --model my-model --url {url}/v1/chat/completions --api openai "
        "--dataset random --min-prompt-length 64 --max-prompt-length 64 --max-tokens 8 --stream",
    ),
    (
        "llama.cpp",
        "genai-bench benchmark --api-backend vllm --api-base {url} --api-key anything --api-model-name {model} "
        "--model-tokenizer org/model --task text-to-text --max-time-per-run 1 --max-requests-per-run 10 "
        "--num-concurrency 2 --traffic-scenario 'D(64,8)'",
    ),
]
"""Type of server, and the command after `loadgen`. {url}, {host}, {port} and {model} are those of the server."""
SMALL = {"chat-only": small_servers.CHAT_ONLY, "llama.cpp": small_servers.LLAMA_CPP, "sglang": small_servers.SGLANG}
SIMULATED = {
    **{name: SimulatedConfig(server=name, **FAST) for name in ("vllm", "tgi", "lightllm")},
    # It runs two requests at a time, so that a sweep finds its capacity without loading this machine.
    "slow vllm": SimulatedConfig(server="vllm", clock="batching", kv_tokens=160),
}
PASSING = (0, 5)
"""Exit codes of a run with valid figures. 5: this machine was busy, and the report says so."""
SWEEP_PASSING = (*PASSING, 6)
"""Exit codes of a sweep with a capacity. 6: its interval is wide, because the runs take only one second."""
SHAREGPT = [
    {
        "id": str(number),
        "conversations": [
            {"from": "human", "value": f"Tell me about number {number}"},
            {"from": "gpt", "value": "It is a number."},
        ],
    }
    for number in range(4)
]


@pytest.fixture(scope="module")
def url_of() -> Iterator[Callable[[str], str]]:
    """Return a function that starts a server of a type when it is first needed, and returns its URL."""
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as stack:

        def start(name: str) -> str:
            if name not in urls:
                server = running(SIMULATED[name]) if name in SIMULATED else small_server(SMALL[name])
                urls[name] = stack.enter_context(server).url
            return urls[name]

        yield start


def fill(command: str, server: str, url: str) -> list[str]:
    """Return the words of a command, with the address and the model of a server."""
    model = "org/model" if server in SMALL else "llama-2-7b"
    address = urlsplit(url)
    values = {"url": url, "host": str(address.hostname), "port": str(address.port), "model": model}
    for name, value in values.items():
        command = command.replace("{" + name + "}", value)
    return shlex.split(command)


def written_command(err: str) -> list[str]:
    """Return the words of the command that a refusal writes, without `loadgen`."""
    lines = [line.strip() for line in err.splitlines()]
    assert "Write:" in lines, err
    words = shlex.split(lines[lines.index("Write:") + 1])
    assert words[0] == "loadgen"
    return words[1:]


def assert_measured(folder: Path) -> None:
    """Check that the folder holds one run or sweep with complete requests and a latency."""
    summaries = [json.loads(path.read_text()) for path in folder.rglob("summary.json")]
    assert summaries
    for summary in summaries:
        counts = summary["requests"]
        assert counts["sent"] == counts["complete"] + counts["errors"].get("cancelled", 0)
        assert counts["complete"] > 0
        assert 0 < summary["latency"]["ttft_s"]["p50"] <= summary["latency"]["e2e_s"]["p50"]
        assert summary["throughput"]["output_tokens_per_s"] > 0


@pytest.mark.parametrize(("server", "command"), COMMANDS)
def test_a_first_command_measures(server: str, command: str, url_of: Callable[[str], str], tmp_path: Path) -> None:
    """The command measures at the first try, or is answered with a complete command that measures."""
    (tmp_path / "sharegpt.json").write_text(json.dumps(SHAREGPT))
    words = fill(command, server, url_of(server))
    result = loadgen(tmp_path, *words)
    if result.returncode == 2:
        assert not [*tmp_path.rglob("run.jsonl")], "a refused command sends nothing"
        result = loadgen(tmp_path, *written_command(result.stderr))
    is_sweep = result.args[0] == "sweep"
    assert result.returncode in (SWEEP_PASSING if is_sweep else PASSING), result.stderr
    assert not is_sweep or "Capacity: " in result.stdout
    assert_measured(tmp_path)


def test_the_table_has_forty_commands_and_six_types_of_servers() -> None:
    """A row that is removed must be replaced."""
    assert len(COMMANDS) == 40
    assert {server for server, _ in COMMANDS} == {*SMALL, *SIMULATED}


def test_a_module_of_the_user_does_not_replace_one_of_a_library(tmp_path: Path) -> None:
    """The simulated server starts in a folder whose attr.py has the name of a module that aiohttp imports."""
    (tmp_path / "attr.py").write_text("raise SystemExit('the module of the user was imported')\n", "utf-8")
    words = ["burst", "--simulated", "--server", "vllm", "--n", "4", "--output-tokens", "2", "--no-report"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loadgen", *words],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 5), done.stderr
