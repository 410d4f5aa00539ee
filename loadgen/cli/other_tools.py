"""Translates command lines of other load testers.

New users may type the options of vllm bench, GuideLLM, AIPerf, k6, Locust, oha, hey, wrk or vegeta. `check_words`
raises one error for all these options. Its hint is the complete loadgen command with the equivalent options and their
values, and the reason for each option that is left out. docs/guides/coming-from.md has the same mapping as tables.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import Any

from loadgen.cli.examples import EXAMPLES
from loadgen.errors import PlanError

RENAMED = {
    "--url": "--base-url --target --server-url --server.base_url",
    "--model": "-m --model-name --model-names --served-model-name --server.model_name",
    "--tokenizer": "--processor --tokenizer-path --tokenizer.pretrained_model_name_or_path",
    "--rate": "--request-rate --qps --rps -q -R",
    "--concurrency": "--max-concurrency --users --vus --connections --parallel --num-concurrent-requests --max-workers",
    "--n": (
        "--num-prompts --num-requests --request-count --max-requests --iterations -i --num-conversations "
        "--max-num-completed-requests --number"
    ),
    "--duration": "--max-seconds --benchmark-duration --run-time --max-duration -z",
    "--input-tokens": (
        "--isl --input-len --random-input-len --synthetic-input-tokens-mean --prompt-tokens --prompt-tokens-mean "
        "--mean-input-tokens --input-sequence-length --data.input_distribution.mean"
    ),
    "--output-tokens": (
        "--osl --output-len --random-output-len --max-tokens --max-new-tokens --output-tokens-mean "
        "--sharegpt-output-len --hf-output-len --custom-output-len --mean-output-tokens --output-sequence-length "
        "--data.output_distribution.mean"
    ),
    "--out": "--result-dir --results-dir --output-path --output-dir --artifact-dir --output-artifact-dir",
    "--seed": "--random-seed",
    "--warmup": "--num-warmups --warmup-request-count --num-warmup-requests --warmup-requests",
    "--timeout": "--request-timeout --request-timeout-seconds",
    "--header": "-H --headers",
    "--workers": "--processes --num-workers",
    "--expect-workers": "--num-machines",
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
    "--latency-correction": "send times never depend on responses, so there is nothing to correct",
    "--disable-keepalive": "connections are reused",
    "--use-beam-search": "write it as --extra-body",
}
"""Options without a value that have no equivalent, with the reason."""
LEFT_OUT = {
    "--result-filename": SAVED,
    "--outputs": SAVED,
    "--format": "--json prints summary.json; `loadgen export RUN --csv FOLDER` writes tables",
    "--csv": "`loadgen export RUN --csv FOLDER` writes tables",
    "--html": SAVED,
    "--summary-export": SAVED,
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
    "--percentile-metrics": "all metrics are reported",
    "--metric-percentiles": "p50, p90, p95 and p99 are reported",
    "--tokenizer-mode": "--tokenizer names a tokenizer.json",
    "--ready-check-timeout-sec": "the server must be ready",
    "--lora-modules": "name the adapter with --model",
    "--threads": "use --workers for more processes",
    "--tag": "use --label",
    "--server.type": "the server type is detected",
    "--api.type": "use --endpoint",
    "--api.streaming": STREAMS,
    "--load.type": "use --rate or --concurrency",
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
        *("load-test", "stress", "perf", "test", "start"),
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
ENDPOINTS = {"chat": "chat", "openai-chat": "chat", "completions": "completions", "embeddings": "embeddings"}
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
    "--rate": re.compile(".*,"),
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
_OURS = {other: ours for ours, others in RENAMED.items() for other in others.split()} | ONLY_RUN


class Draft:
    """A loadgen command under construction, translated from a command line of another load tester."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.values: dict[str, list[str]] = {}
        """Values by loadgen option, in the order of the words. A flag has the value ""."""
        self.foreign: list[str] = []
        """Options and arguments of other tools, as they were written."""
        self.unknown: list[str] = []
        """Options that neither loadgen nor another tool has."""
        self.notes: list[str] = []
        self.special: dict[str, str] = {}
        """Values that have a meaning only together, such as host and port."""
        self.body: dict[str, Any] = {}
        self.arguments: list[str] = []

    def set(self, option: str, value: str) -> None:
        """Set an option to one value."""
        self.values[option] = [value]

    def add(self, option: str, value: str) -> None:
        """Add one more value to an option."""
        self.values.setdefault(option, []).append(value)

    def first(self, option: str) -> str | None:
        """Return the first value of an option, or None if the option is not set."""
        return self.values[option][0] if option in self.values else None

    def leave_out(self, option: str, reason: str) -> None:
        """Add a note that an option has no equivalent in loadgen, with the reason."""
        self.notes.append(f"{option} is left out: {reason}.")


def check_words(command: Any, params: Sequence[Any], words: Sequence[str]) -> None:
    """Raise PlanError if the words contain options or URLs of other load testers.

    The hint of the error is the loadgen command to use. `words` are the arguments of the typer command `command`, and
    `params` are its parameters.
    """
    draft = _read(command.name, params, words)
    if not draft.foreign:
        return
    _compose(draft)
    options = list(dict.fromkeys([*draft.foreign, *draft.unknown]))
    if all(URL.fullmatch(word) for word in options):
        raise PlanError(f"did you mean --url {options[0]}?", _hint(draft))
    verb = "is no option" if len(options) == 1 else "are no options"
    raise PlanError(f"{join_and(options)} {verb} of loadgen {command.name}", _hint(draft))


def check_command(run: Any, params: Sequence[Any], words: Sequence[str]) -> None:
    """Raise PlanError if the first word is the name of another load tester, one of its subcommands, or a URL.

    The hint of the error is the loadgen command to use. `run` is the typer command `run`, and `params` are its
    parameters.
    """
    name = words[0]
    if URL.fullmatch(name):
        check_words(run, params, words)
    if name not in TOOLS:
        return
    rest = list(words)
    while rest and (rest[0] in TOOLS or rest[0] == "run"):
        rest.pop(0)
    if any(word.startswith("-") or URL.fullmatch(word) for word in rest):
        draft = _read(run.name, params, rest)
        _compose(draft)
        raise PlanError(f"unknown command {name!r}", _hint(draft))
    choices = [
        f"{EXAMPLES['run']}   at a rate",
        "loadgen run --url http://127.0.0.1:8000 --concurrency 8 --duration 60s   8 in flight",
        f"{EXAMPLES['burst']}   all at once",
    ]
    if name == "locust":
        choices.insert(0, f"{EXAMPLES['ui']}   on Locust's web page")
    raise PlanError(f"unknown command {name!r}", "\n  ".join(["Write one of:", *choices]))


def join_and(names: Sequence[str]) -> str:
    """Join names with commas and `and`: `--isl, --osl and --qps`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _hint(draft: Draft) -> str:
    return "\n  ".join(["Write:", command_line(draft), *draft.notes])


def command_line(draft: Draft) -> str:
    """Return a completed draft as a command line, quoted for a shell and without secrets."""
    from loadgen.servers.auth import redact

    words = ["loadgen", draft.command, *draft.arguments]
    for option in sorted(draft.values, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        for value in draft.values[option]:
            words += [option, value] if value else [option]
    return shlex.join(redact(words))


# Read the words of the command line.


def _read(name: str, params: Sequence[Any], words: Sequence[str]) -> Draft:
    """Translate the arguments of the command `name` into a draft. Options of loadgen are kept."""
    draft = Draft(name)
    known = {option: param for param in params for option in (*param.opts, *param.secondary_opts)}
    has_arguments = any(param.param_type_name == "argument" for param in params)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            _read_argument(draft, word, allowed=has_arguments)
            continue
        option, value = _split(word, known)
        param = known.get(option)
        is_foreign = name != "sweep" and _is_foreign_form(option, value if value is not None else (rest or [""])[0])
        if param is None or is_foreign:
            _read_other(draft, option, value, rest)
            continue
        name_as_typed = word.partition("=")[0]
        if name_as_typed not in known and not re.match(r"-[a-zA-Z]\d", word):
            draft.foreign.append(name_as_typed)  # such as -rate=50 or --input_tokens
        is_flag = getattr(param, "is_flag", False)
        if not is_flag and value is None:
            value = rest.pop(0) if rest else ""
        draft.add(_first_long(param, option), "" if is_flag else value or "")
    return draft


def _read_other(draft: Draft, option: str, value: str | None, rest: list[str]) -> None:
    """Add an option to the draft that loadgen does not have.

    `value` is the value attached to the option, or None. `rest` holds the words after the option. Values of the option
    are removed from `rest`.
    """
    is_known = _is_foreign(option) or option in FOREIGN_FORMS
    (draft.foreign if is_known else draft.unknown).append(option)
    if option in LEFT_OUT_FLAGS:
        draft.leave_out(option, LEFT_OUT_FLAGS[option])
        return
    if value is None and rest and not rest[0].startswith("-"):
        value = rest.pop(0)
    while option == "--goodput" and rest and not rest[0].startswith("-"):  # vllm bench accepts several values
        value = f"{value} {rest.pop(0)}"
    _read_foreign(draft, option, value or "")


def _read_argument(draft: Draft, word: str, *, allowed: bool) -> None:
    """Add a word that belongs to no option to the draft: a URL, a plan file, or an unknown word.

    A plan file is only accepted if `allowed` is set.
    """
    if URL.fullmatch(word):
        draft.foreign.append(CREDENTIALS.sub("", word))
        draft.set("--url", word)
    elif allowed and not word.endswith(SCRIPTS):
        draft.arguments.append(word)
    else:
        draft.unknown.append(word)
        draft.leave_out(word, "loadgen runs no script" if word.endswith(SCRIPTS) else "this command has no arguments")


def _split(word: str, known: dict[str, Any]) -> tuple[str, str | None]:
    """Split a word into the usual name of an option and its attached value, such as `--num_prompts=5` or `-c10`.

    The value is None if the word has no value. Single-dash names such as `-rate=50` (vegeta) are also recognised.
    """
    name, equals, value = word.partition("=")
    for form in (name, name.replace("_", "-"), f"-{name}", f"-{name}".replace("_", "-")):
        if form in known or _is_foreign(form):
            return form, value if equals else None
    if re.fullmatch(r"-[a-zA-Z]\d\S*", word):
        return word[:2], word[2:]
    return name, value if equals else None


def _is_foreign(name: str) -> bool:
    return name in _OURS or name in LEFT_OUT or name in LEFT_OUT_FLAGS or name in SAMPLING or name in HANDLERS


def _is_foreign_form(name: str, value: str) -> bool:
    """Return True if loadgen has this option too, but the value has the format of another load tester."""
    form = FOREIGN_FORMS.get(name)
    return form is not None and form.match(value) is not None


def _first_long(param: Any, name: str) -> str:
    if name in param.secondary_opts:
        return name
    return next((option for option in param.opts if option.startswith("--")), name)


def _read_foreign(draft: Draft, name: str, value: str) -> None:
    """Translate one option of another load tester, and add the result to the draft."""
    if name in HANDLERS:
        HANDLERS[name](draft, value)
    elif name in SAMPLING:
        draft.body[SAMPLING[name]] = _json_value(value)
    elif name in LEFT_OUT:
        draft.leave_out(name, LEFT_OUT[name])
    elif "," in value and _OURS.get(name, name) in ("--rate", "--concurrency"):
        option = "--rates" if _OURS.get(name, name) == "--rate" else "--concurrency"
        draft.command = "sweep"
        draft.set(option, value)
    elif name in ("--out", "-o", "--output"):
        draft.leave_out(name, f"{SAVED}; `loadgen export RUN --csv FOLDER` writes tables")
    elif name in _OURS:
        _set_renamed(draft, _OURS[name], value)
    else:
        draft.leave_out(name, "loadgen does not know it")


def _set_renamed(draft: Draft, ours: str, value: str) -> None:
    if ours in ("--duration", "--timeout") and re.fullmatch(r"[\d.]+", value):
        value += "s"
    if ours == "--header":
        _header(draft, value)
    elif ours == "--rate":
        draft.set(ours, value.removesuffix("/s").removesuffix("/1s"))
    else:
        draft.set(ours, value)


# Translate single options.


def _header(draft: Draft, value: str) -> None:
    if value.lower().startswith("authorization:"):
        _api_key(draft, value)
    elif value.lower().startswith("content-type:"):
        draft.leave_out("-H Content-Type", ONLY_POST)
    else:
        draft.add("--header", value)


def _api_key(draft: Draft, _value: str) -> None:
    draft.notes.append("The key is left out: put it into the environment, as LOADGEN_API_KEY.")


def _u(draft: Draft, value: str) -> None:
    """Translate `-u`, which is the URL for AIPerf, and the number of users for Locust and k6."""
    draft.set("--concurrency" if value.isdecimal() else "--url", value)


def _t(draft: Draft, value: str) -> None:
    """Translate `-t`, which is the run time for Locust, and a timeout in seconds for hey."""
    if value.isdecimal():
        draft.set("--timeout", f"{value}s")
    else:
        draft.set("--duration", value)


def _backend(draft: Draft, value: str) -> None:
    pairs = _pairs(value)
    if "target" in pairs:
        draft.set("--url", pairs["target"])
    if "model" in pairs:
        draft.set("--model", pairs["model"])
    if value in ("vllm", "tgi", "lightllm"):
        draft.set("--server", value)
    elif value in ENDPOINTS:
        draft.set("--endpoint", ENDPOINTS[value])


def _endpoint_path(draft: Draft, value: str) -> None:
    if value.endswith("/chat/completions"):
        draft.set("--endpoint", "chat")
    elif value.endswith("/completions"):
        draft.set("--endpoint", "completions")
    elif value.endswith("/embeddings"):
        draft.set("--endpoint", "embeddings")
    else:
        draft.special["path"] = value


def _endpoint_type(draft: Draft, value: str) -> None:
    if value in ENDPOINTS:
        draft.set("--endpoint", ENDPOINTS[value])
    else:
        draft.leave_out(f"--endpoint-type {value}", "loadgen measures completions, chat and embeddings")


def _profile(draft: Draft, value: str) -> None:
    """Translate `--profile` or `--rate-type` of GuideLLM. The flag `--profile` of vllm bench, without a value, has no
    effect.
    """
    pairs = _pairs(value)
    if "max_concurrency" in pairs or "streams" in pairs:
        draft.set("--concurrency", pairs.get("max_concurrency") or pairs["streams"])
    if "rate" in pairs:
        draft.set("--rate", pairs["rate"])
    draft.special["profile"] = pairs.get("kind", value)


def _constraint(draft: Draft, value: str) -> None:
    pairs = _pairs(value)
    if pairs.get("kind") == "max_requests":
        draft.set("--n", pairs.get("count", ""))
    elif pairs.get("kind") in ("max_seconds", "max_duration"):
        draft.set("--duration", pairs.get("seconds", pairs.get("duration", "60")) + "s")
    else:
        draft.leave_out(f"--constraint {value}", "use --n, --duration or --assert")


def _tokenizer_pairs(draft: Draft, value: str) -> None:
    draft.set("--tokenizer", _pairs(value).get("model", value))


def _data(draft: Draft, value: str) -> None:
    """Translate `--data` of GuideLLM: synthetic lengths, a file, or the name of a dataset."""
    pairs = _pairs(value) or _json_object(value)
    if "prompt_tokens" in pairs or "output_tokens" in pairs:
        if "prompt_tokens" in pairs:
            draft.set("--input-tokens", str(pairs["prompt_tokens"]))
        if "output_tokens" in pairs:
            draft.set("--output-tokens", str(pairs["output_tokens"]))
    else:
        _dataset(draft, value)


def _dataset(draft: Draft, value: str) -> None:
    """Translate the name of a dataset or the path of a file with prompts."""
    name = draft.special.get("dataset", "")
    if "trace" in name:
        draft.set("--arrivals", f"trace:{value}")
    elif name == "sharegpt" or "sharegpt" in value.lower():
        draft.set("--workload", f"sharegpt:{value}")
    elif value.endswith((".json", ".jsonl", ".csv", ".txt", ".gz", ".parquet")) or "/" in value.strip("/"):
        draft.set("--workload", value)
    elif value not in ("random", "synthetic"):
        draft.leave_out(f"the dataset {value}", "loadgen reads local files; write --workload FILE")


def _dataset_name(draft: Draft, value: str) -> None:
    draft.special["dataset"] = value
    path = draft.special.get("dataset-path")
    if path:
        draft.values.pop("--workload", None)
        _dataset(draft, path)
    elif value not in ("random", "random-ids", "sharegpt", "custom", "synthetic", "mooncake_trace", "single_turn"):
        draft.leave_out(f"the dataset {value}", "loadgen reads local files; write --workload FILE")


def _dataset_path(draft: Draft, value: str) -> None:
    draft.special["dataset-path"] = value
    _dataset(draft, value)


def _extra_inputs(draft: Draft, value: str) -> None:
    pairs = _json_object(value) or dict([value.split(":", 1)] if ":" in value else [])
    for name, field in pairs.items():
        if name != "ignore_eos":  # the default
            draft.body[name] = _json_value(str(field)) if isinstance(field, str) else field


def _goodput(draft: Draft, value: str) -> None:
    """Translate latency bounds in milliseconds, such as `ttft:500 tpot:50`."""
    for bound in value.split():
        name, _, number = bound.partition(":")
        if name in LATENCY_NAMES:
            draft.add("--goodput", f"{LATENCY_NAMES[name]} < {number}ms")
        else:
            draft.leave_out(f"--goodput {bound}", "write a latency and a bound, such as 'ttft < 500ms'")


def _threshold(draft: Draft, value: str) -> None:
    """Translate a latency threshold of k6 in milliseconds, such as `p(95)<500`."""
    match = re.search(r"(\w*?)[ .:_=]*p\(?(\d+(?:\.\d+)?)\)?\s*(<=?)\s*([\d.]+)\s*(ms|s)?", value)
    if match is None:
        draft.leave_out(value, "write --assert 'ttft.p99 < 500ms'")
        return
    latency = LATENCY_NAMES.get(match[1], "e2e")
    draft.add("--assert", f"{latency}.p{match[2]} {match[3]} {match[4]}{match[5] or 'ms'}")


def _stages(draft: Draft, value: str) -> None:
    """Translate stages of k6, such as `30s:10,1m:20`, to a closed loop with the largest number of users."""
    stages = [stage.rpartition(":") for stage in value.split(",") if ":" in stage]
    targets = [int(target) for _, _, target in stages if target.isdecimal()]
    if not targets:
        draft.leave_out("--stages", STARTS)
        return
    from loadgen.workloads.spec_syntax import WorkloadError, parse_seconds

    try:
        total_s = sum(parse_seconds(length) for length, _, _ in stages)
    except WorkloadError:
        total_s = 60.0
    draft.set("--concurrency", str(max(targets)))
    draft.set("--duration", f"{total_s:g}s")
    draft.leave_out("the ramp of --stages", STARTS)


def _special(name: str) -> Callable[[Draft, str], None]:
    """Return a handler that stores the value of an option as `name`. `_compose` translates the stored values later."""
    return lambda draft, value: draft.special.update({name: value})


HANDLERS: dict[str, Callable[[Draft, str], None]] = {
    "--host": _special("host"),
    "--port": _special("port"),
    "-p": _special("port"),
    "-u": _u,
    "-t": _t,
    "--backend": _backend,
    "--backend-type": _backend,
    "--endpoint": _endpoint_path,
    "--endpoint-type": _endpoint_type,
    "--model": _tokenizer_pairs,
    "--tokenizer": _tokenizer_pairs,
    "--profile": _profile,
    "--rate-type": _profile,
    "--constraint": _constraint,
    "--request-rate-mode": _special("pattern"),
    "--arrival-pattern": _special("pattern"),
    "--burstiness": _special("burstiness"),
    "--arrival-smoothness": _special("burstiness"),
    "--ramp-up-start-rps": _special("ramp-from"),
    "--ramp-up-end-rps": _special("ramp-to"),
    "--isl-stddev": _special("isl-sd"),
    "--synthetic-input-tokens-stddev": _special("isl-sd"),
    "--prompt-tokens-stdev": _special("isl-sd"),
    "--stddev-input-tokens": _special("isl-sd"),
    "--osl-stddev": _special("osl-sd"),
    "--output-tokens-stddev": _special("osl-sd"),
    "--output-tokens-stdev": _special("osl-sd"),
    "--stddev-output-tokens": _special("osl-sd"),
    "--random-range-ratio": _special("range"),
    "--random-prefix-len": _special("prefix"),
    "--data": _data,
    "--dataset": _dataset_path,
    "--dataset-path": _dataset_path,
    "--dataset-name": _dataset_name,
    "--input-file": _dataset_path,
    "--custom-dataset-type": _dataset_name,
    "--public-dataset": _dataset_name,
    "--extra-inputs": _extra_inputs,
    "--api-key": _api_key,
    "--goodput": _goodput,
    "--slo": _threshold,
    "--threshold": _threshold,
    "--thresholds": _threshold,
    "--stage": _stages,
    "--stages": _stages,
    "--concurrency-sweep": lambda draft, value: _read_foreign(draft, "--concurrency", value),
}
"""Functions that translate options whose value needs a translation."""


def _pairs(value: str) -> dict[str, Any]:
    """Parse `key=value,key=value` into a dict. Any other text gives an empty dict."""
    parts = [part.partition("=") for part in value.split(",")]
    return {name: text for name, equals, text in parts} if all(equals for _, equals, _ in parts) else {}


def _json_object(value: str) -> dict[str, Any]:
    result = _json_value(value)
    return result if isinstance(result, dict) else {}


def _json_value(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


# Complete the command.


def _compose(draft: Draft) -> None:
    """Complete the draft: combine options that only have a meaning together, and choose the loadgen command."""
    _compose_url(draft)
    _compose_load(draft)
    _compose_lengths(draft)
    if draft.body:
        body = _json_object(draft.first("--extra-body") or "{}") | draft.body
        draft.set("--extra-body", json.dumps(body))
    has_load = any(option in draft.values for option in ("--rate", "--arrivals", "--concurrency", "--duration"))
    if draft.command == "burst" and has_load:
        draft.command = "run"
    if draft.command == "sweep":
        for option, renamed in (("--rate", "--rates"), ("--assert", "--objective")):
            if option in draft.values:
                draft.values[renamed] = draft.values.pop(option)
    if draft.command == "run" and not has_load and "--n" in draft.values and draft.first("--n"):
        draft.command = "burst" if not draft.arguments else "run"
    ends_itself = bool(draft.arguments) or (draft.first("--arrivals") or "").startswith(("ramp:", "steps:", "trace:"))
    if draft.command == "run" and not (ends_itself or {"--n", "--duration"} & draft.values.keys()):
        draft.set("--duration", "60s")
        draft.notes.append("--duration 60s is added, because a run needs an end.")
    if draft.command == "sweep" and not {"--rates", "--concurrency", "--objective"} & draft.values.keys():
        draft.set("--objective", "ttft.p99 < 1s")
        draft.notes.append("Replace the objective by yours: a sweep finds the highest load that meets it.")


def _compose_url(draft: Draft) -> None:
    host, port = draft.special.get("host"), draft.special.get("port")
    if host or port:
        base = host if host and "://" in host else f"http://{host or '127.0.0.1'}"
        if port is None and not re.search(r":\d+/?$", base) and base.startswith("http://"):
            port = "8000"
        draft.set("--url", f"{base.rstrip('/')}:{port}" if port else base)
    url = draft.first("--url")
    if url:
        url = url if "://" in url else f"http://{url}"
        draft.set("--url", CREDENTIALS.sub("", url))
        if CREDENTIALS.search(url):
            draft.notes.append("The user and password of the URL are left out: write them as --header.")
    path = draft.special.get("path")
    if path:
        draft.leave_out(f"--endpoint {path}", "loadgen measures completions, chat and embeddings")


def _compose_load(draft: Draft) -> None:
    """Set the loadgen options for rate, arrivals or concurrency.

    The options follow from the rate, profile, arrival pattern and ramp in the words of the other tool.
    """
    profile = draft.special.get("profile", "")
    rate = draft.first("--rate")
    if profile in ("concurrent", "synchronous", "throughput", "sweep"):
        draft.values.pop("--rate", None)
        if profile == "sweep":
            draft.command = "sweep"
            draft.values.pop("--concurrency", None)
        elif profile == "concurrent" and rate:
            draft.set("--concurrency", rate)
        elif profile == "synchronous":
            draft.set("--concurrency", "1")
        return
    ramp = draft.special.get("ramp-from"), draft.special.get("ramp-to")
    if all(ramp):
        draft.values.pop("--rate", None)
        draft.set("--arrivals", f"ramp:{ramp[0]}..{ramp[1]}/{draft.values.pop('--duration', ['60s'])[0]}")
        return
    if rate is None:
        return
    if rate in ("inf", "0"):
        del draft.values["--rate"]
        draft.values.setdefault("--n", ["1000"])
        return
    burstiness = draft.special.get("burstiness", "1")
    if profile == "constant" or draft.special.get("pattern") == "constant":
        del draft.values["--rate"]
        draft.set("--arrivals", f"constant:{rate}")
    elif _number(burstiness) not in (None, 0.0, 1.0):
        del draft.values["--rate"]
        draft.set("--arrivals", f"gamma:{rate},cv={1 / sqrt(float(burstiness)):.4g}")


def _compose_lengths(draft: Draft) -> None:
    for option, name in (("--input-tokens", "isl-sd"), ("--output-tokens", "osl-sd")):
        mean, deviation = _number(draft.first(option)), _number(draft.special.get(name))
        ratio = _number(draft.special.get("range"))
        if mean and deviation:
            draft.set(option, f"lognormal:mean={mean:g},cv={deviation / mean:.4g}")
        elif mean and ratio and 0 < ratio < 1:
            draft.set(option, f"uniform:{round(mean * (1 - ratio))}..{round(mean * (1 + ratio))}")
    prefix = draft.special.get("prefix", "0")
    if prefix.isdecimal() and int(prefix):
        draft.set("--workload", f"shared-prefix:groups=1,tokens={prefix}")


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def options_of_other_tools() -> Iterator[str]:
    """Yield every option of other load testers that loadgen translates, or leaves out with a reason."""
    yield from (*(_OURS.keys() - ONLY_RUN.keys()), *LEFT_OUT, *LEFT_OUT_FLAGS, *SAMPLING, *HANDLERS)
