"""Tables of the options of other load testers, and of the loadgen options that replace them.

`loadgen.cli.other_tools` translates commands with these tables.
"""

from __future__ import annotations

import re

RENAMED = {
    "--url": "--base-url --target --server-url --server.base_url --api-base",
    "--model": "--model-name --model-names --served-model-name --server.model_name --api-model-name",
    "--tokenizer": (
        "--processor --tokenizer-path --tokenizer.pretrained_model_name_or_path --model-tokenizer --tokenizer-name"
    ),
    "--rate": "--request-rate --qps --rps -q -R",
    "--concurrency": (
        "--max-concurrency --users --vus --parallel --num-concurrent-requests --max-workers --num-concurrency --max-vus"
    ),
    "--n": (
        "--num-prompts --num-requests --request-count --max-requests --iterations -i --num-conversations "
        "--max-num-completed-requests --number --max-requests-per-run"
    ),
    "--duration": "--max-seconds --benchmark-duration --run-time --max-duration -z",
    "--input-tokens": (
        "--isl --input-len --random-input-len --random-input --synthetic-input-tokens-mean --prompt-tokens "
        "--prompt-tokens-mean --mean-input-tokens --input-sequence-length --data.input_distribution.mean"
    ),
    "--output-tokens": (
        "--osl --output-len --random-output-len --random-output --max-tokens --max-new-tokens --output-tokens-mean "
        "--sharegpt-output-len --hf-output-len --custom-output-len --mean-output-tokens --output-sequence-length "
        "--data.output_distribution.mean"
    ),
    "--batch-size": "--batch-size-text --prompt-batch-size --random-batch-size",
    "--out": "--result-dir --results-dir --output-path --output-dir --artifact-dir --output-artifact-dir",
    "--seed": "--random-seed",
    "--warmup": "--num-warmups --warmup-request-count --num-warmup-requests --warmup-requests",
    "--timeout": "--request-timeout --request-timeout-seconds",
    "--header": "--headers",
    "--workers": "--processes --num-workers",
    "--expect-workers": "--num-machines",
    "--proxy": "-x",
    "--ca-file": "--cacert --root-certs",
}
"""Options of other tools by the loadgen option that has the same meaning."""
SAVED = "each run is saved, with run.jsonl, summary.json and report.html"
STREAMS = "responses are always streamed"
NO_UI = "the command line shows progress; `loadgen ui` opens a page"
STARTS = "all users start at once; use `--arrivals ramp:1..20/60s` for a rising rate"
ONLY_POST = "loadgen writes the requests of LLM endpoints itself"
LEFT_OUT_FLAGS = {
    "--streaming": STREAMS,
    "--stream": STREAMS,
    "--save-result": SAVED,
    "--save-detailed": SAVED,
    "--append-result": SAVED,
    "--headless": NO_UI,
    "--autostart": NO_UI,
    "--no-tui": NO_UI,
    "--only-summary": NO_UI,
    "--disable-tqdm": NO_UI,
    "--disable-progress": NO_UI,
    "--verbose": NO_UI,
    "-v": NO_UI,
    "--trust-remote-code": "no code of a model is run",
    "--no-stream": STREAMS,
    "--latency-correction": "with --rate, send times do not depend on responses, so there is nothing to correct",
    "--disable-keepalive": "connections are reused",
    "--use-beam-search": "write it as --extra-body",
    "--latency": "all latencies are reported",
    "--flush-cache": "each run on a real server has new prompts; add --cold to empty the cache of SGLang or vLLM too",
    "--disable-stream": STREAMS,
}
"""Options without a value that have no equivalent, with the reason."""
LEFT_OUT = {
    "--result-filename": SAVED,
    "--outputs": SAVED,
    "--format": "--json prints summary.json; `loadgen export RUN --csv FOLDER` writes tables",
    "--csv": "`loadgen export RUN --csv FOLDER` writes tables",
    "--html": SAVED,
    "--summary-export": SAVED,
    "--profile-export-file": SAVED,
    "--output-file": SAVED,
    "--metadata": "use --label and --platform",
    "--ui": NO_UI,
    "--ui-type": NO_UI,
    "--loglevel": NO_UI,
    "--spawn-rate": STARTS,
    "-r": STARTS,
    "--ramp-up": STARTS,
    "--ramp-up-strategy": "the ramp of --ramp-up-start-rps is linear",
    "--service-kind": "the server type is detected",
    "--concurrency-ramp-duration": STARTS,
    "--stop-timeout": "requests in flight are always finished",
    "--method": ONLY_POST,
    "--body": ONLY_POST,
    "-T": ONLY_POST,
    "-D": ONLY_POST,
    "--targets": ONLY_POST,
    "--locustfile": "`loadgen ui` and the docs page on Locust explain custom users",
    "-f": "`loadgen ui` and the docs page on Locust explain custom users",
    "--percentile-metrics": "all figures are reported",
    "--metric-percentiles": "p50, p90, p95 and p99 are reported",
    "--tokenizer-mode": "--tokenizer names a tokenizer.json",
    "--ready-check-timeout-sec": "the server must be ready",
    "--lora-modules": "name the adapter with --model",
    "--threads": "use --workers for more processes",
    "--tag": "use --label",
    "--task": "use --endpoint",
    "--api": "use --endpoint",
    "--llm-api": "use --endpoint",
    "--api.streaming": STREAMS,
    "--data.type": "prompts are synthetic; --workload names a file",
    "--measurement-interval": "use --duration",
    "--max-threads": "use --workers for more processes",
    "--autoquit": NO_UI,
    "--summary-trend-stats": "p50, p90, p95 and p99 are reported",
    "-e": "write the values as options",
    "--load.num_workers": "use --workers",
}
"""Options with a value that have no equivalent, with the reason."""
SAMPLING = {
    "--temperature": "temperature",
    "--top-p": "top_p",
    "--top-k": "top_k",
    "--min-p": "min_p",
    "--frequency-penalty": "frequency_penalty",
    "--presence-penalty": "presence_penalty",
    "--repetition-penalty": "repetition_penalty",
}
"""Options that become fields of the request body."""
TOOLS = frozenset(
    {
        *("vllm", "guidellm", "aiperf", "genai-perf", "inference-perf", "llmperf", "k6", "locust", "oha", "hey", "wrk"),
        *("wrk2", "vegeta", "ab", "bench", "benchmark", "benchmarks", "profile", "attack", "serve", "load", "loadtest"),
        *("load-test", "stress", "perf", "test", "start", "evalscope", "genai-bench", "sglang", "bench_serving"),
        *("sglang.bench_serving", "bench_serving.py", "benchmark_serving.py", "token_benchmark_ray.py", "llm_bench"),
        *("inference-benchmarker",),
    }
)
"""Names of other load testers and of their subcommands."""
LATENCY_NAMES = {
    "ttft": "ttft",
    "time_to_first_token": "ttft",
    "tpot": "tpot",
    "inter_token_latency": "tpot",
    "itl": "itl",
    "e2el": "e2e",
    "e2e": "e2e",
    "request_latency": "e2e",
}
ENDPOINTS = {
    "chat": "chat",
    "openai-chat": "chat",
    "completion": "completions",
    "completions": "completions",
    "openai-audio": "transcriptions",
    "embeddings": "embeddings",
    "openai-embeddings": "embeddings",
    "vllm-rerank": "rerank",
    "cohere_rankings": "rerank",
    "hf_tei_rankings": "rerank",
}
ENDPOINT_PATHS = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/audio/transcriptions": "transcriptions",
    "/audio/speech": "speech",
    "/embeddings": "embeddings",
    "/embed": "embed",
    "/rerank": "rerank",
    "/score": "score",
    "/classify": "classify",
    "/predict": "classify",
    "/responses": "responses",
    "/messages": "messages",
    "/generate_stream": "",
    "/generate": "",
}
"""Endpoints by the end of their path. Empty: the endpoint that loadgen measures on such a server by default."""
WRITTEN_FIELDS = frozenset(
    {
        *("model", "messages", "prompt", "inputs", "stream", "stream_options", "n"),
        *("max_tokens", "max_completion_tokens", "max_new_tokens"),
    }
)
"""Fields of a request body that loadgen writes itself."""
RESULT_FILE = re.compile(r"\.(json|jsonl|csv|html|yaml|yml|txt)$")
ORDER = (
    *("--server", "--url", "--model", "--endpoint", "--arrivals", "--rate", "--rates", "--concurrency", "--n"),
    *("--duration", "--workload", "--input-tokens", "--output-tokens", "--objective"),
)
"""Options that come first in the written command, in this order."""
FOREIGN_FORMS = {
    "--endpoint": re.compile("/"),
    "--goodput": re.compile("[^<]*:[^<]*$"),
    "--model": re.compile("kind="),
    "--tokenizer": re.compile("kind="),
    "--rate": re.compile(r".*,|\d+/(?!s$)\d*[a-z]+$"),
    "-d": re.compile("[{@]"),
    **dict.fromkeys(("--concurrency", "-c"), re.compile(".*,")),
    **dict.fromkeys(("--out", "-o", "--output"), re.compile(r"(json|csv|influxdb|experimental-[\w-]+)(=|$)")),
}
"""Value formats of other tools, by the name of an option that loadgen has too."""
CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
"""User and password of a URL."""
SCRIPTS = (".js", ".ts", ".py")
URL = re.compile(r"(https?://\S+|[\w.-]+:\d+(/\S*)?)")
ONLY_RUN = {
    **{option: option for option in ("--rate", "--concurrency", "--duration", "--arrivals")},
    "-c": "--concurrency",
    "-d": "--duration",
}
"""Options of `run` that `burst` or `sweep` does not have, by the names that people write."""
OURS = {other: ours for ours, others in RENAMED.items() for other in others.split()} | ONLY_RUN
"""The loadgen option for each option of `RENAMED` and `ONLY_RUN`."""
