"""Command lines of other load testers, and the loadgen command that answers them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from loadgen.cli.other_tool_options import LEFT_OUT, LEFT_OUT_FLAGS, TOOLS
from loadgen.cli.other_tools import HANDLERS, options_of_other_tools
from tests.support.command import in_process

URL = "--url http://127.0.0.1:8000"
ANSWERS = {
    # vllm bench serve
    "bench serve --base-url http://127.0.0.1:8000 --num-prompts 100 --request-rate inf": f"burst {URL} --n 100",
    "run --base-url http://127.0.0.1:8000 --request-rate inf --max-concurrency 8 --num-prompts 90": (
        f"run {URL} --concurrency 8 --n 90"
    ),
    "run --host gpu-1 --port 8080 --request-rate 10 --max-concurrency 4 --num-prompts 100": (
        "run --url http://gpu-1:8080 --rate 10 --concurrency 4 --n 100"
    ),
    "burst --backend openai-chat --host gpu-1 --port 8080 --num-prompts 5": (
        "burst --url http://gpu-1:8080 --endpoint chat --n 5"
    ),
    f"run {URL} --request-rate 10 --burstiness 4 --num-prompts 9": f"run {URL} --arrivals gamma:10,cv=0.5 --n 9",
    f"run {URL} --endpoint /v1/chat/completions --num-prompts 9 --max-concurrency 2": (
        f"run {URL} --endpoint chat --concurrency 2 --n 9"
    ),
    f"run {URL} -n 9 --random-input-len 1000 --random-output-len 100 --random-range-ratio 0.2": (
        f"burst {URL} --n 9 --input-tokens uniform:800..1200 --output-tokens uniform:80..120"
    ),
    f"run {URL} --rate 5 -n 9 --random-prefix-len 64": (
        f"run {URL} --rate 5 --n 9 --workload shared-prefix:groups=1,tokens=64"
    ),
    f"run {URL} --rate 5 -n 9 --goodput ttft:500 tpot:50": (
        f"run {URL} --rate 5 --n 9 --goodput 'ttft < 500ms' --goodput 'tpot < 50ms'"
    ),
    f"run {URL} --rate 5 -n 9 --temperature 0.7 --top-p 0.9": (
        f"""run {URL} --rate 5 --n 9 --extra-body '{{"temperature": 0.7, "top_p": 0.9}}'"""
    ),
    f"run {URL} --rate 5 -n 9 --dataset-name sharegpt --dataset-path a.json": (
        f"run {URL} --rate 5 --n 9 --workload sharegpt:a.json"
    ),
    f"run {URL} --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 20": (
        f"run {URL} --arrivals ramp:1..20/60s"
    ),
    # GuideLLM
    "guidellm benchmark --target http://127.0.0.1:8000 --rate-type concurrent --rate 16 --max-seconds 30": (
        f"run {URL} --concurrency 16 --duration 30s"
    ),
    "run --target http://127.0.0.1:8000 --profile constant --rate 5 --max-requests 50": (
        f"run {URL} --arrivals constant:5 --n 50"
    ),
    "run --target http://127.0.0.1:8000 --rate-type synchronous --max-seconds 30": (
        f"run {URL} --concurrency 1 --duration 30s"
    ),
    "run --target http://127.0.0.1:8000 --data prompt_tokens=256,output_tokens=64 --rate 5 --max-seconds 9": (
        f"run {URL} --rate 5 --duration 9s --input-tokens 256 --output-tokens 64"
    ),
    "run --target http://127.0.0.1:8000 --rate 1,2,4": f"sweep {URL} --rates 1,2,4",
    "run --target http://127.0.0.1:8000 --rate-type sweep": f"sweep {URL}",
    "guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=m "
    "--profile kind=throughput,max_concurrency=20 --constraint kind=max_requests,count=20 "
    "--data kind=synthetic_text,prompt_tokens=512,output_tokens=64": (
        f"run {URL} --model m --concurrency 20 --n 20 --input-tokens 512 --output-tokens 64"
    ),
    # AIPerf
    "aiperf profile -m m -u 127.0.0.1:8000 --endpoint-type chat --streaming --concurrency 8 --request-count 80": (
        "run --url http://127.0.0.1:8000 --model m --endpoint chat --concurrency 8 --n 80"
    ),
    f"run {URL} --rate 5 --benchmark-duration 30 --isl 512 --isl-stddev 128 --osl 64 --random-seed 7": (
        f"run {URL} --rate 5 --duration 30s --input-tokens lognormal:mean=512,cv=0.25 --output-tokens 64 --seed 7"
    ),
    f"run {URL} --request-rate 5 --request-rate-mode constant -n 9 --extra-inputs ignore_eos:true": (
        f"run {URL} --arrivals constant:5 --n 9"
    ),
    f"run {URL} --endpoint-type hf_tei_rankings --batch-size-text 16 --request-count 9 -c 2": (
        f"run {URL} --endpoint rerank --concurrency 2 --n 9 --batch-size 16"
    ),
    f"run {URL} --input-file a.jsonl --custom-dataset-type mooncake_trace": f"run {URL} --arrivals trace:a.jsonl",
    # k6, Locust, oha, hey, wrk, vegeta, ab
    f"run {URL} --vus 10 --duration 30s": f"run {URL} --concurrency 10 --duration 30s",
    f"run {URL} --vus 10 --iterations 100": f"run {URL} --concurrency 10 --n 100",
    f"run {URL} --stages 30s:10,1m:20": f"run {URL} --concurrency 20 --duration 90s",
    f"run {URL} --rate 5 -d 9s --threshold 'http_req_duration=p(95)<500'": (
        f"run {URL} --rate 5 --duration 9s --assert 'e2e.p95 < 500ms'"
    ),
    "locust --headless -u 10 -r 2 -t 1m --host http://127.0.0.1:8000": f"run {URL} --concurrency 10 --duration 1m",
    "run -z 30s -c 50 -q 10 http://127.0.0.1:8000": f"run {URL} --rate 10 --concurrency 50 --duration 30s",
    "hey -n 200 -c 50 http://127.0.0.1:8000": f"run {URL} --concurrency 50 --n 200",
    "vegeta attack -rate=50/s -duration=30s -targets=t.txt": "run --rate 50/s --duration 30s",
    "http://127.0.0.1:8000": f"run {URL} --duration 60s",
    f"run {URL} -c10 --num_prompts=5 --result-dir out": f"run {URL} --concurrency 10 --n 5 --out out",
    f"run {URL} --vus 10": f"run {URL} --concurrency 10 --duration 60s",
    f"burst {URL} --vus 10 -n 100": f"run {URL} --concurrency 10 --n 100",
    f"run {URL} --concurrency 1,2,4": f"sweep {URL} --concurrency 1,2,4",
    f"run {URL} --concurrency-sweep 1,2 --slo 'ttft.p99<500ms'": (
        f"sweep {URL} --concurrency 1,2 --objective 'ttft.p99 < 500ms'"
    ),
    f"k6 run --vus 5 --duration 10s {URL} script.js": f"run {URL} --concurrency 5 --duration 10s",
    f"run {URL} --rate 5 --n 9 --input_tokens 64": f"run {URL} --rate 5 --n 9 --input-tokens 64",
    f"burst {URL} --rate 5 --duration 9s": f"run {URL} --rate 5 --duration 9s",
    # SGLang, genai-bench, EvalScope, LLMPerf, inference-perf
    f"sglang.bench_serving {URL} --backend sglang-oai-chat --num-prompts 9 --random-input 100 "
    "--random-range-ratio 0.5": (f"burst {URL} --endpoint chat --n 9 --input-tokens uniform:50..100"),
    "genai-bench benchmark --api-base http://127.0.0.1:8000 --api-backend vllm --num-concurrency 2 "
    "--max-time-per-run 2 --traffic-scenario 'N(480,240)/(300,150)'": (
        f"run {URL} --concurrency 2 --duration 2m --input-tokens lognormal:mean=480,cv=0.5 "
        "--output-tokens lognormal:mean=300,cv=0.5"
    ),
    f"run {URL} --rate 5 --traffic-scenario 'U(50,100)/(200,250)' --duration 9s": (
        f"run {URL} --rate 5 --duration 9s --input-tokens uniform:50..100 --output-tokens uniform:200..250"
    ),
    f"evalscope perf {URL} --parallel 2 --number 9 --min-prompt-length 10 --max-prompt-length 20": (
        f"run {URL} --concurrency 2 --n 9 --input-tokens uniform:10..20"
    ),
    """inference-perf --server.base_url http://127.0.0.1:8000 --api.type chat --load.stages """
    """'[{"rate": 1, "duration": 30}, {"rate": 2, "duration": 60}]'""": (
        f"run {URL} --endpoint chat --arrivals steps:1@30s,2@60s"
    ),
    # The same option differs between tools.
    f"hey -q 5 -c 4 -z 9s {URL}": f"run {URL} --rate 20 --concurrency 4 --duration 9s",
    f"oha -q 5 -c 4 -z 9s {URL}": f"run {URL} --rate 5 --concurrency 4 --duration 9s",
    f"hey -x 127.0.0.1:3128 -n 9 -c 4 {URL}": f"run {URL} --concurrency 4 --n 9 --proxy 127.0.0.1:3128",
    f"hey -x http://me:correct-horse@127.0.0.1:3128 -n 9 -c 4 {URL}": (
        f"run {URL} --concurrency 4 --n 9 --proxy http://127.0.0.1:3128"
    ),
    "oha --unix-socket /run/vllm.sock -n 9 -c 4 http://localhost/v1/completions": (
        "run --url unix:/run/vllm.sock:/v1/completions --concurrency 4 --n 9"
    ),
    f"wrk -t2 -c4 -d9s {URL}": f"run {URL} --concurrency 4 --duration 9s",
    "locust -u 4 -t 9 -H http://127.0.0.1:8000": f"run {URL} --concurrency 4 --duration 9s",
    f"ab -t 9 -c 4 -p body.json -T application/json {URL}": f"run {URL} --concurrency 4 --duration 9s",
    # A tool that loadgen does not know
    f"fortio load -qps 10 -c 4 -t 9s {URL}": f"run {URL} --rate 10 --concurrency 4 --duration 9s",
    # Bodies, paths and results
    """oha -n 9 -c 4 -m POST -d '{"model": "m", "messages": [], "max_tokens": 8, "top_p": 0.5}' 127.0.0.1:8000/v1""": (
        """run --url http://127.0.0.1:8000/v1 --model m --concurrency 4 --n 9 --output-tokens 8 """
        """--extra-body '{"top_p": 0.5}'"""
    ),
    """oha -n 9 -c 4 -d '{"inputs": "Hi", "parameters": {"max_new_tokens": 8}}' http://127.0.0.1:8000""": (
        f"run {URL} --concurrency 4 --n 9 --output-tokens 8"
    ),
    "bench serve --base-url http://127.0.0.1:8000 --endpoint /api/v3/chat/completions --num-prompts 9": (
        "burst --url http://127.0.0.1:8000/api/v3 --endpoint chat --n 9"
    ),
    "guidellm benchmark --target http://127.0.0.1:8000 --rate-type poisson --rate 5 --max-seconds 9 "
    "--output-path a.json --data prompt_tokens=100,prompt_tokens_stdev=25": (
        f"run {URL} --rate 5 --duration 9s --input-tokens lognormal:mean=100,cv=0.25"
    ),
    f"vegeta attack -rate=300/1m -duration=9s {URL}": f"run {URL} --rate 5 --duration 9s",
    f"vegeta attack -rate=0 -max-workers=4 -duration=9s {URL}": f"run {URL} --concurrency 4 --duration 9s",
    "wrk -c4 -d9s --unknown http://127.0.0.1:8000": f"run {URL} --concurrency 4 --duration 9s",
    f"run {URL} --rate 5 -n 9 --isl 8 --tokenizer org/none": f"run {URL} --rate 5 --n 9 --input-tokens 8",
    f"sweep {URL} --rate 5 --objective 'ttft.p99 < 1s'": f"sweep {URL} --rates 5 --objective 'ttft.p99 < 1s'",
}


def answer(folder: Path, command: str) -> list[str]:
    """Return the lines that loadgen prints for a command that it refuses."""
    code, out, err = in_process(folder, *shlex.split(command))
    assert (code, out) == (2, ""), err
    return [line.strip() for line in err.splitlines()]


@pytest.mark.parametrize(("typed", "written"), ANSWERS.items())
def test_a_foreign_command_is_answered_with_the_complete_loadgen_command(
    typed: str, written: str, tmp_path: Path
) -> None:
    """Values are carried over and quoted for a shell, and all foreign options are answered together."""
    lines = answer(tmp_path, typed)
    assert lines[lines.index("Write:") + 1] == f"loadgen {written}"


@pytest.mark.parametrize("written", sorted({*ANSWERS.values()}))
def test_each_written_command_is_accepted(written: str, tmp_path: Path) -> None:
    """No option of it is refused: only the server does not answer, or a file does not exist."""
    words = shlex.split(written)
    words = [word.replace("http://gpu-1:8080", "http://127.0.0.1:9").replace(":8000", ":9") for word in words]
    code, _, err = in_process(tmp_path, *words, *([] if "--url" in words else ["--url", "http://127.0.0.1:9"]))
    assert code == 3 or "cannot read" in err, (code, err)


def test_values_are_quoted_for_a_shell(tmp_path: Path) -> None:
    """The written command can be pasted, whatever the value contains."""
    words = ("run", "--url", "http://h:1", "--qps", "5", "-n", "9", "--workload", "jsonl:it's a; file.jsonl")
    code, _, err = in_process(tmp_path, *words)
    line = next(line for line in err.splitlines() if line.strip().startswith("loadgen run"))
    assert code == 2
    assert shlex.split(line)[-1] == "jsonl:it's a; file.jsonl"


@pytest.mark.parametrize(
    "option",
    [
        "--api-key sk-test-123456",
        "-H 'Authorization: Bearer sk-test-123456'",
        "--header 'Authorization: Bearer sk-test-123456'",
        "--base-url http://user:sk-test-123456@h:1",
        "http://user:sk-test-123456@h:1",
    ],
)
def test_a_key_is_never_shown(option: str, tmp_path: Path) -> None:
    """The answer leaves it out, and says where to put it instead."""
    lines = answer(tmp_path, f"run --qps 5 {option}")
    assert "sk-test" not in " ".join(lines)
    assert "left out: " in " ".join(lines) or "$AUTHORIZATION" in " ".join(lines)


@pytest.mark.parametrize("option", sorted(options_of_other_tools()))
def test_every_foreign_option_is_answered_in_every_command_that_sends_load(option: str, tmp_path: Path) -> None:
    """It becomes another option, or the answer says why it is left out."""
    value = "" if option in LEFT_OUT_FLAGS else " 5"
    if option in ("--endpoint", "--model", "--tokenizer", "--goodput"):
        value = {"--endpoint": " /v1/completions", "--goodput": " ttft:5"}.get(option, " kind=x,model=m")
    if option == "-d":
        value = """ '{"max_tokens": 5}'"""
    for command in ("run", "burst"):
        lines = answer(tmp_path, f"{command} {URL} {option}{value}")
        assert "Write:" in lines
        assert lines[lines.index("Write:") + 1].startswith("loadgen ")
        if option in LEFT_OUT or option in LEFT_OUT_FLAGS:
            assert any(line.startswith(f"{option} is left out: ") for line in lines)


def test_unknown_options_are_named_with_the_foreign_ones(tmp_path: Path) -> None:
    """One answer has everything that must change."""
    lines = answer(tmp_path, f"run {URL} --isl 5 --foo 3 --osl 6")
    assert "--isl, --osl and --foo are no options of loadgen run" in lines[0]
    assert "--foo is left out: loadgen does not know it." in lines


@pytest.mark.parametrize("typed", ["run --ur http://127.0.0.1:1", "run --urll http://127.0.0.1:1"])
def test_a_typing_error_is_left_to_the_parser(typed: str, tmp_path: Path) -> None:
    """It suggests options that are similar."""
    assert "--url" in " ".join(answer(tmp_path, typed)).partition("No such option")[2]


def test_a_dissimilar_option_is_not_suggested(tmp_path: Path) -> None:
    """A wrong guess misleads more than none."""
    assert " ".join(answer(tmp_path, f"run {URL} --colour red")).endswith("No such option: --colour")


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_the_name_of_another_tool_leads_to_the_commands(name: str, tmp_path: Path) -> None:
    """Without options, the answer lists what can be measured."""
    lines = answer(tmp_path, name)
    assert lines[0] == f"loadgen: unknown command {name!r}"
    assert "loadgen run --url http://127.0.0.1:8000 --rate 5 --duration 30s   at a rate" in lines
    assert (name == "locust") == any(line.startswith("loadgen ui ") for line in lines)


@pytest.mark.parametrize("typed", [f"rn {URL} --rate 5", "reprot runs/a --format json", "reprot"])
def test_a_misspelt_command_is_not_taken_for_another_tool(typed: str, tmp_path: Path) -> None:
    """The parser suggests the command that was meant."""
    assert "No such command" in " ".join(answer(tmp_path, typed))


def test_help_is_a_command(tmp_path: Path) -> None:
    """`loadgen help run` is `loadgen run --help`."""
    assert in_process(tmp_path, "help") == in_process(tmp_path, "--help")
    assert in_process(tmp_path, "help", "run") == in_process(tmp_path, "run", "--help")


def test_handlers_and_reasons_do_not_overlap() -> None:
    """Otherwise one of them would never be used."""
    assert not (HANDLERS.keys() & LEFT_OUT.keys()) | (HANDLERS.keys() & LEFT_OUT_FLAGS.keys())
