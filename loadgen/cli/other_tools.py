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
from pathlib import Path
from typing import Any

from loadgen.cli.examples import EXAMPLES
from loadgen.cli.other_tool_options import (
    CREDENTIALS,
    ENDPOINT_PATHS,
    ENDPOINTS,
    FOREIGN_FORMS,
    LATENCY_NAMES,
    LEFT_OUT,
    LEFT_OUT_FLAGS,
    ONLY_POST,
    ONLY_RUN,
    ORDER,
    OURS,
    RESULT_FILE,
    SAMPLING,
    SAVED,
    SCRIPTS,
    STARTS,
    TOOLS,
    URL,
    WRITTEN_FIELDS,
)
from loadgen.errors import PlanError


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
        self.tool = ""
        """Name of the other tool, if the command names it. The same option differs between tools."""

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
        """Add a note that `option` is left out of the loadgen command. `reason` says why."""
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
    """Raise PlanError with the right loadgen command if `words` look like a command of another load tester.

    `words` are the words that the user typed after `loadgen`. The error is raised if the first word is one of these:

    - The name or a subcommand of a known load tester.
    - A URL.
    - An unknown word, if a URL and options of load testers follow. This word counts as the name of a load tester.

    `run` is the typer command `run`, and `params` are its parameters.
    """
    name = words[0]
    if URL.fullmatch(name):
        check_words(run, params, words)
    is_unknown = name not in TOOLS
    rest = list(words[1:] if is_unknown else words)
    while rest and (rest[0] in TOOLS or rest[0] == "run"):
        rest.pop(0)
    if any(word.startswith("-") or URL.fullmatch(word) for word in rest):
        draft = _read(run.name, params, rest, name)
        _compose(draft)
        if not is_unknown or (draft.foreign and "--url" in draft.values):
            raise PlanError(f"unknown command {name!r}", _hint(draft))
    if is_unknown:
        return
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


def _read(name: str, params: Sequence[Any], words: Sequence[str], tool: str = "") -> Draft:
    """Translate `words`, the arguments of the command `name`, into a Draft (a loadgen command under construction).

    Options that belong to loadgen are not changed. `params` are the parameters of the loadgen command. If the command
    line starts with the name of another load tester, `tool` is this name.
    """
    draft = Draft(name)
    draft.tool = tool
    known = {option: param for param in params for option in (*param.opts, *param.secondary_opts)}
    has_arguments = any(param.param_type_name == "argument" for param in params)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            draft.foreign.append(word)
            draft.leave_out("what follows --", "it is meant for another program")
            break
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
    """Translate an option that loadgen does not have, and add the result to the draft.

    `value` is the value in the same word as the option, such as 5 in `--num-prompts=5`, or None. `rest` contains the
    following words. If the value of the option is one of them, it is removed from `rest`.
    """
    is_known = _is_foreign(option) or option in FOREIGN_FORMS
    (draft.foreign if is_known else draft.unknown).append(option)
    if option in LEFT_OUT_FLAGS:
        draft.leave_out(option, LEFT_OUT_FLAGS[option])
        return
    # The URL may follow a flag that is not known here. A single option may also be a misspelt --url.
    is_url = bool(rest) and bool(draft.tool or draft.foreign) and URL.fullmatch(rest[0]) is not None
    if value is None and rest and not rest[0].startswith("-") and (is_known or not is_url):
        value = rest.pop(0)
    while option == "--goodput" and rest and not rest[0].startswith("-"):  # vllm bench accepts several values
        value = f"{value} {rest.pop(0)}"
    _read_foreign(draft, option, value or "")


def _read_argument(draft: Draft, word: str, *, allowed: bool) -> None:
    """Add `word` to the draft. The word belongs to no option: it is a URL, an argument of the command, or unknown.

    An argument is, for example, the path of a plan file. `allowed` is True if the command has arguments.
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
    """Split a word of a command line into the name of an option and its value.

    For example, `--num_prompts=5` becomes `--num-prompts` and `5`, and `-c10` becomes `-c` and `10`. A name with a
    single dash, such as `-rate=50` of vegeta, becomes `--rate`. The value is None if the word contains no value.
    `known` contains the options of the loadgen command.
    """
    name, equals, value = word.partition("=")
    for form in (name, name.replace("_", "-"), f"-{name}", f"-{name}".replace("_", "-")):
        if form in known or _is_foreign(form):
            return form, value if equals else None
    if re.fullmatch(r"-[a-zA-Z]\d\S*", word):
        return word[:2], word[2:]
    return name, value if equals else None


def _is_foreign(name: str) -> bool:
    return name in OURS or name in LEFT_OUT or name in LEFT_OUT_FLAGS or name in SAMPLING or name in HANDLERS


def _is_foreign_form(name: str, value: str) -> bool:
    """Return True if the value of the option `name` is written as in another load tester.

    loadgen has an option with this name too, but its values have a different format.
    """
    form = FOREIGN_FORMS.get(name)
    return form is not None and form.match(value) is not None


def _first_long(param: Any, name: str) -> str:
    if name in param.secondary_opts:
        return name
    return next((option for option in param.opts if option.startswith("--")), name)


def _read_foreign(draft: Draft, name: str, value: str) -> None:
    """Translate the option `name` of another load tester, and add the result to the draft."""
    if name in HANDLERS:
        HANDLERS[name](draft, value)
    elif name in SAMPLING:
        draft.body[SAMPLING[name]] = _json_value(value)
    elif name in LEFT_OUT:
        draft.leave_out(name, LEFT_OUT[name])
    elif "," in value and OURS.get(name, name) in ("--rate", "--concurrency"):
        option = "--rates" if OURS.get(name, name) == "--rate" else "--concurrency"
        draft.command = "sweep"
        draft.set(option, value)
    elif name == "--rate":
        draft.set(name, _per_second(value))
    elif name in ("--out", "-o", "--output") or (OURS.get(name) == "--out" and RESULT_FILE.search(value)):
        draft.leave_out(name, f"{SAVED}; `loadgen export RUN --csv FOLDER` writes tables")
    elif name in OURS:
        _set_renamed(draft, OURS[name], value)
    else:
        draft.leave_out(name, "loadgen does not know it")


def _set_renamed(draft: Draft, ours: str, value: str) -> None:
    if ours in ("--duration", "--timeout") and re.fullmatch(r"[\d.]+", value):
        value += "s"
    if ours == "--header":
        _header(draft, value)
    elif ours == "--rate":
        draft.set(ours, _per_second(value))
    else:
        draft.set(ours, value)


def _per_second(rate: str) -> str:
    """Convert a rate of vegeta, such as `50/s` or `300/1m`, to requests per second."""
    number, slash, unit = rate.partition("/")
    seconds = {"s": 1, "1s": 1, "m": 60, "1m": 60, "h": 3600, "1h": 3600}.get(unit)
    if not slash or seconds is None or not number.isdecimal():
        return rate
    return f"{int(number) / seconds:g}"


# Translate single options.


def _header(draft: Draft, value: str) -> None:
    if URL.fullmatch(value):  # `-H` is the host for Locust
        draft.set("--url", value)
    elif value.lower().startswith("authorization:"):
        _api_key(draft, value)
    elif value.lower().startswith("content-type:"):
        draft.leave_out("-H Content-Type", ONLY_POST)
    else:
        draft.add("--header", value)


def _api_key(draft: Draft, _value: str) -> None:
    draft.notes.append("The key is left out: put it into the environment, as LOADGEN_API_KEY.")


def _u(draft: Draft, value: str) -> None:
    """Translate `-u`: the URL for AIPerf, or the number of users for Locust and k6."""
    draft.set("--concurrency" if value.isdecimal() else "--url", value)


def _t(draft: Draft, value: str) -> None:
    """Translate `-t`: the run time for Locust and ab, the number of threads for wrk, a timeout in seconds for hey."""
    if draft.tool in ("wrk", "wrk2"):
        draft.leave_out("-t", "use --workers for more processes")
    elif draft.tool in ("locust", "ab"):
        draft.set("--duration", f"{value}s" if value.isdecimal() else value)
    elif value.isdecimal():
        draft.set("--timeout", f"{value}s")
    else:
        draft.set("--duration", value)


def _backend(draft: Draft, value: str) -> None:
    pairs = _pairs(value)
    if "target" in pairs:
        draft.set("--url", pairs["target"])
    if "model" in pairs:
        draft.set("--model", pairs["model"])
    draft.special["backend"] = value
    if (
        value in ("vllm", "tgi", "lightllm", "sglang") and draft.tool != "genai-bench"
    ):  # there, vllm is any OpenAI-style API
        draft.set("--server", value)
    elif value in ENDPOINTS or value.endswith("-chat"):
        draft.set("--endpoint", ENDPOINTS.get(value, "chat"))


def _m(draft: Draft, value: str) -> None:
    """Translate `-m`: the model for AIPerf, or the HTTP method for oha and hey."""
    if value.upper() in ("GET", "POST", "PUT"):
        draft.leave_out("-m", ONLY_POST)
    else:
        draft.set("--model", value)


def _p(draft: Draft, value: str) -> None:
    """Translate `-p`: the port for Locust, or a file with the request body for ab."""
    if value.isdecimal():
        draft.special["port"] = value
    else:
        draft.leave_out("-p", ONLY_POST)


def _request_body(draft: Draft, value: str) -> None:
    """Translate `-d` of oha and hey, which is a request body.

    The model, the output length and other settings in the body are kept. The prompt in the body is left out.
    """
    body = _json_object(value)
    body |= body.pop("parameters", {})  # of TGI
    if isinstance(body.get("model"), str):
        draft.values.setdefault("--model", [body["model"]])
    for field in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        if isinstance(body.get(field), int):
            draft.values.setdefault("--output-tokens", [str(body[field])])
    draft.body |= {name: setting for name, setting in body.items() if name not in WRITTEN_FIELDS}
    draft.leave_out(
        "the prompt of -d", "each prompt is different; set the length with --input-tokens, or name a --workload FILE"
    )


def _endpoint_path(draft: Draft, value: str) -> None:
    for path, endpoint in ENDPOINT_PATHS.items():
        if value.endswith(path):
            draft.special["prefix-path"] = value.removesuffix(path).removesuffix("/v1").strip("/")
            if endpoint:
                draft.set("--endpoint", endpoint)
            return
    draft.special["path"] = value


def _endpoint_type(draft: Draft, value: str) -> None:
    if value in ENDPOINTS:
        draft.set("--endpoint", ENDPOINTS[value])
    else:
        draft.leave_out(f"--endpoint-type {value}", "loadgen measures completions, chat, embeddings and rerank")


def _profile(draft: Draft, value: str) -> None:
    """Translate `--profile` or `--rate-type` of GuideLLM, such as `concurrent` or `kind=concurrent,streams=8`.

    vllm bench has a flag `--profile`, which has no value. An empty `value` is therefore ignored.
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
        draft.special["isl-sd"] = str(pairs.get("prompt_tokens_stdev", ""))
        draft.special["osl-sd"] = str(pairs.get("output_tokens_stdev", ""))
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
    """Translate latency bounds of another tool in ms, such as `ttft:500 tpot:50`, to values of --goodput."""
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
    """Translate stages of k6, such as `30s:10,1m:20` (10 users after 30 s, 20 users after another minute).

    The result is a closed loop with the total duration of all stages. Its number of clients is constant: the largest
    number of users in any stage. loadgen starts all clients at once, so the ramps between stages are left out.
    """
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


def _load_stages(draft: Draft, value: str) -> None:
    """Translate stages of inference-perf, such as `[{"rate": 10, "duration": 30}]`."""
    stages = _json_value(value)
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages) or not stages:
        draft.leave_out("--load.stages", "write --arrivals steps:10@30s,20@30s")
        return
    rates = [(stage.get("rate", 1), stage.get("duration", 60)) for stage in stages]
    if len(rates) == 1:
        draft.set("--rate", str(rates[0][0]))
        draft.set("--duration", f"{rates[0][1]}s")
    else:
        draft.set("--arrivals", "steps:" + ",".join(f"{rate}@{duration_s}s" for rate, duration_s in rates))


def _minutes(draft: Draft, value: str) -> None:
    draft.set("--duration", f"{value}m")


def _traffic_scenario(draft: Draft, value: str) -> None:
    """Translate a traffic scenario of genai-bench into options for the lengths of prompts and outputs in tokens.

    - `D(100,50)`: each prompt has 100 tokens, and each output has 50 tokens.
    - `U(50,100)/(200,250)`: the lengths are uniformly distributed, from 50 to 100 and from 200 to 250.
    - `N(480,240)/(300,150)`: the lengths are normally distributed, with the means 480 and 300 and the standard
      deviations 240 and 150.

    Any other value is left out, and the user gets a note.
    """
    pairs = re.findall(r"\((\d+),(\d+)\)", value)
    options = ("--input-tokens", "--output-tokens")
    if value.startswith("D(") and len(pairs) == 1:
        for option, length in zip(options, pairs[0], strict=True):
            draft.set(option, length)
    elif value.startswith("U(") and len(pairs) == 2:
        for option, (low, high) in zip(options, pairs, strict=True):
            draft.set(option, f"uniform:{low}..{high}")
    elif value.startswith("N(") and len(pairs) == 2:
        for option, name, (mean, deviation) in zip(options, ("isl-sd", "osl-sd"), pairs, strict=True):
            draft.set(option, mean)
            draft.special[name] = deviation
    else:
        draft.leave_out("--traffic-scenario", "write the lengths as --input-tokens and --output-tokens")


def _special(name: str) -> Callable[[Draft, str], None]:
    """Return a function that stores the value of an option under `name` in the draft.

    Such a value cannot be translated alone, because it depends on other options. `_compose` translates it later.
    """
    return lambda draft, value: draft.special.update({name: value})


HANDLERS: dict[str, Callable[[Draft, str], None]] = {
    "--host": _special("host"),
    "--port": _special("port"),
    "--unix-socket": _special("unix-socket"),
    "-p": _p,
    "-m": _m,
    "-H": _header,
    "-d": _request_body,
    "-u": _u,
    "-t": _t,
    "--backend": _backend,
    "--backend-type": _backend,
    "--api-backend": _backend,
    "--server.type": _backend,
    "--endpoint": _endpoint_path,
    "--custom-endpoint": _endpoint_path,
    "--api.type": _endpoint_type,
    "--load.type": _special("pattern"),
    "--load.stages": _load_stages,
    "--max-time-per-run": _minutes,
    "--traffic-scenario": _traffic_scenario,
    "--min-prompt-length": _special("isl-min"),
    "--max-prompt-length": _special("isl-max"),
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
    """Complete the draft: combine options that depend on each other, and choose the loadgen command."""
    _compose_url(draft)
    _compose_load(draft)
    _compose_lengths(draft)
    _compose_tokenizer(draft)
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
        draft.notes.append(
            "The sweep finds the highest rate that the server keeps up with. --objective 'ttft.p99 < 1s' asks for the "
            "highest rate that meets an objective."
        )


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
    proxy = draft.first("--proxy")
    if proxy and CREDENTIALS.search(proxy if "://" in proxy else f"http://{proxy}"):
        draft.set("--proxy", CREDENTIALS.sub("", proxy if "://" in proxy else f"http://{proxy}"))
        draft.notes.append("The user and password of the proxy are left out: put them into LOADGEN_PROXY_AUTH.")
    socket_path = draft.special.get("unix-socket")
    if socket_path:
        http_path = re.sub(r"^\w+://[^/]*", "", url or "").rstrip("/")
        draft.set("--url", f"unix:{socket_path}" + (f":{http_path}" if http_path else ""))
    prefix = draft.special.get("prefix-path")
    if prefix and url:
        draft.set("--url", f"{draft.values['--url'][0].rstrip('/')}/{prefix}")
    path = draft.special.get("path")
    if path:
        draft.leave_out(f"--endpoint {path}", "loadgen measures completions, chat, embeddings and rerank")


def _compose_load(draft: Draft) -> None:
    """Translate the load of the other tool's command line into loadgen options, such as --rate, --arrivals or
    --concurrency.

    The command line may state the load as a rate, a profile, an arrival pattern or a ramp.
    """
    profile = draft.special.get("profile", "")
    if profile in ("concurrent", "synchronous", "throughput", "sweep"):
        _compose_profile(draft, profile)
        return
    ramp = draft.special.get("ramp-from"), draft.special.get("ramp-to")
    if all(ramp):
        draft.values.pop("--rate", None)
        draft.set("--arrivals", f"ramp:{ramp[0]}..{ramp[1]}/{draft.values.pop('--duration', ['60s'])[0]}")
    elif draft.first("--rate") in ("inf", "0"):
        del draft.values["--rate"]
        if not {"--concurrency", "--duration"} <= draft.values.keys():
            draft.values.setdefault("--n", ["1000"])
    elif "--rate" in draft.values:
        _compose_rate(draft, constant="constant" in (profile, draft.special.get("pattern")))


def _compose_profile(draft: Draft, profile: str) -> None:
    """Replace the load of a GuideLLM command by the corresponding options of loadgen.

    `draft` is the loadgen command under construction. `profile` is the GuideLLM profile. In the following profiles,
    GuideLLM's `--rate` is not a request rate, so it is removed from `draft`:

    - `concurrent`: The value of `--rate` is the number of clients (--concurrency).
    - `synchronous`: There is one client.
    - `sweep`: The command becomes `loadgen sweep`.
    - `throughput`: No further changes.
    """
    rate = draft.values.pop("--rate", None)
    if profile == "sweep":
        draft.command = "sweep"
        draft.values.pop("--concurrency", None)
    elif profile == "concurrent" and rate:
        draft.set("--concurrency", rate[0])
    elif profile == "synchronous":
        draft.set("--concurrency", "1")


def _compose_rate(draft: Draft, *, constant: bool) -> None:
    """Set the loadgen option `--rate` or `--arrivals` for a load that has a request rate.

    If `constant` is True, requests arrive at equal intervals. Otherwise the intervals are random. The other tool's
    option for burstiness then determines how much they vary.
    """
    rate, concurrency = draft.first("--rate"), _number(draft.first("--concurrency"))
    per_worker = _number(rate)
    if draft.tool == "hey" and per_worker and concurrency:
        rate = f"{per_worker * concurrency:g}"
        draft.set("--rate", rate)
        draft.notes.append("-q of hey is a rate per worker, so it is multiplied by -c.")
    burstiness = draft.special.get("burstiness", "1")
    if constant:
        del draft.values["--rate"]
        draft.set("--arrivals", f"constant:{rate}")
    elif _number(burstiness) not in (None, 0.0, 1.0):
        del draft.values["--rate"]
        draft.set("--arrivals", f"gamma:{rate},cv={1 / sqrt(float(burstiness)):.4g}")


def _compose_tokenizer(draft: Draft) -> None:
    """Remove the option `--tokenizer` from `draft` if the tokenizer is not on this machine.

    Other load testers download the tokenizer, because they count the tokens themselves. loadgen can do without it,
    because most servers count the tokens.
    """
    name = draft.first("--tokenizer")
    if not name or name.endswith(".json"):
        return
    from loadgen.workloads.prompts import PromptError, tokenizer_file

    try:
        tokenizer_file(Path(name))
    except PromptError:
        del draft.values["--tokenizer"]
        reason = (
            f"it is not on this machine, and most servers count tokens. To use it: hf download {name} tokenizer.json"
        )
        draft.leave_out(f"--tokenizer {name}", reason)


def _compose_lengths(draft: Draft) -> None:
    shortest, longest = draft.special.get("isl-min"), draft.special.get("isl-max")
    if shortest and longest and shortest != longest:
        draft.set("--input-tokens", f"uniform:{shortest}..{longest}")
    elif shortest or longest:
        draft.set("--input-tokens", longest or shortest or "")
    for option, name in (("--input-tokens", "isl-sd"), ("--output-tokens", "osl-sd")):
        mean, deviation = _number(draft.first(option)), _number(draft.special.get(name))
        ratio = _number(draft.special.get("range"))
        if mean and deviation:
            draft.set(option, f"lognormal:mean={mean:g},cv={deviation / mean:.4g}")
        elif mean and ratio and 0 < ratio < 1 and _is_sglang(draft):
            draft.set(option, f"uniform:{max(1, round(mean * ratio))}..{mean:g}")
        elif mean and ratio and 0 < ratio < 1:
            draft.set(option, f"uniform:{round(mean * (1 - ratio))}..{round(mean * (1 + ratio))}")
    prefix = draft.special.get("prefix", "0")
    if prefix.isdecimal() and int(prefix):
        draft.set("--workload", f"shared-prefix:groups=1,tokens={prefix}")


def _is_sglang(draft: Draft) -> bool:
    """Return True if the draft was translated from a command of SGLang's benchmark, sglang.bench_serving.

    There, `--random-range-ratio` is the shortest length divided by the longest length. In other tools, it is the
    largest relative deviation from the mean length.
    """
    return draft.special.get("backend", "").startswith("sglang") or "sglang" in draft.tool


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def options_of_other_tools() -> Iterator[str]:
    """Yield every option of other load testers that loadgen translates, or leaves out with a reason."""
    yield from (*(OURS.keys() - ONLY_RUN.keys()), *LEFT_OUT, *LEFT_OUT_FLAGS, *SAMPLING, *HANDLERS)
