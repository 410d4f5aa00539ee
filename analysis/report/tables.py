"""What the page's tables and cards hold, as plain values for the template; no figure is computed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from analysis import delivery_words, words
from analysis.limits import LIMITS
from analysis.limits import text as limit_text
from analysis.metrics import METRICS
from analysis.stats import PERCENTILES, WITH_INTERVAL, samples_needed
from loadgen.runfile import Run

Summary = Mapping[str, Any]

SERVERS = ("vllm", "tgi", "lightllm", "openai")
FIGURES = ("mean", "min", *WITH_INTERVAL, "p99_9", "max")
LATENCIES = tuple(name for name, metric in METRICS.items() if metric.per != "run")


def names(summaries: Sequence[Summary]) -> list[str]:
    """A short name per run, different for each: server and version, with its repeat or place where these are equal."""
    chosen = [words.who(summary) for summary in summaries]
    runs = [summary["run"] for summary in summaries]
    repeats = [f"{name} (repeat {run['repeat']})" for name, run in zip(chosen, runs, strict=True)]
    if len({*repeats}) == len(repeats) > 1 and all(run["repeats"] > 1 for run in runs):
        return repeats
    again = Counter(chosen)
    return [name if again[name] == 1 else f"{name} (run {place})" for place, name in enumerate(chosen, 1)]


def colour_of(summary: Summary) -> str:
    """The server kind whose colour a run has everywhere."""
    name = summary["server"]["name"]
    return name if name in SERVERS else "openai"


def headline(summary: Summary) -> list[dict[str, str]]:
    """The cards of the first screen: label, value, unit, and what to know about the figure."""
    throughput, latency, requests = summary["throughput"], summary["latency"], summary["requests"]
    total = requests["sent"] + requests["dropped"] + requests["unrecorded"]
    rate = words.significant(throughput["output_tokens_per_s"], 4)
    complete = f"{requests['complete']:,} of {total:,} complete"
    ended = "; ".join(filter(None, (complete, words.rate_interval(summary, "requests_per_s"))))
    mean = latency["normalised_s"]["mean"]
    return [
        _card("Output throughput", rate, "tokens/s", words.tail(summary)),
        _card("Requests", words.significant(throughput["requests_per_s"]), "/s", ended),
        _median("Time to first token", latency["ttft_s"]),
        _median("Time per token", latency["tpot_s"]),
        _median("Between tokens", latency["itl_s"]),
        _median("End to end", latency["e2e_s"]),
        _card("Normalised latency", *_split(words.duration(mean)), "per token, mean"),
        _sending(summary),
    ]


def beliefs(summary: Summary) -> list[dict[str, Any]]:
    """Whether to believe it: sentences, each good or not."""
    requests, tokens = summary["requests"], summary["tokens"]
    whole = requests["complete"] == requests["sent"] + requests["dropped"] + requests["unrecorded"] > 0
    exact = not (tokens["prompt_mismatches"] or tokens["output_mismatches"] or tokens["prompt_unreported"])
    lines = [
        {"good": whole, "text": words.endings(summary)},
        {"good": exact and requests["complete"] > 0, "text": words.lengths(summary)},
        {"good": summary["client"]["verdict"] == "ok", "text": words.believe(summary)},
    ]
    if sent := delivery_words.delivery(summary):
        lines.append({"good": delivery_words.delivered(summary), "text": sent})
    if machines := words.machines(summary):
        lines.append({"good": True, "text": machines})
    if counted := words.counters(summary):
        lines.append({"good": True, "text": counted})
    if window := words.window(summary):
        lines.append({"good": not summary["window"]["reason"].startswith("no plateau"), "text": window})
    return lines + [{"good": False, "text": warning} for warning in words.warnings(summary)]


def trust(summary: Summary) -> dict[str, str]:
    """The beliefs in one sentence and in a word or two, and their kind: good, care or bad."""
    if not summary["requests"]["complete"]:
        return _trust("bad", "no", "There is nothing to believe: no request was complete.")
    if summary["client"]["verdict"] != "ok":
        return _trust("bad", "no", "Not as it stands: the client may have been the limit.")
    if doubts := sum(not line["good"] for line in beliefs(summary)):
        return _trust("care", "with care", f"With care: {words.count(doubts, 'remark')} below.")
    return _trust("good", "yes", "Yes: nothing that was checked speaks against it.")


def overview_rows(summaries: Sequence[Summary]) -> list[list[tuple[str, float | None]]]:
    """One row per run: the figures of OVERVIEW as texts in their units, and as they are."""
    return [[_overview(summary, title) for title, _ in OVERVIEW] for summary in summaries]


def percentile_rows(summaries: Sequence[Summary], part: str = "latency") -> list[dict[str, Any]]:
    """One row per latency and run: unit, n, and for each figure its text, raw value and interval."""
    rows = []
    for name in (name for name in LATENCIES if name in summaries[0][part]):
        described = [summary[part][name] for summary in summaries]
        factor, unit = words.scale_of(next((each["p50"] for each in described if each["p50"]), None))
        for index, each in enumerate(described):
            cells = [_cell(each, figure, factor) for figure in FIGURES if part == "latency" or figure in WITH_INTERVAL]
            rows.append(
                {
                    "metric": name,
                    "title": METRICS[name].title,
                    "run": index,
                    "unit": unit,
                    "n": each["n"],
                    "cells": cells,
                }
            )
    return rows


def failure_rows(summary: Summary) -> list[dict[str, Any]]:
    """One row per error kind: how many, their share, and the most frequent words of each."""
    requests = summary["requests"]
    total = max(1, requests["sent"] + requests["dropped"])
    return [
        {"kind": kind, "count": number, "share": words.share(number / total), "examples": requests["examples"][kind]}
        for kind, number in requests["errors"].items()
    ]


def delivery_rows(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """What the load was by its name, by its due instants and as it was sent: title, and one text per run."""
    found = [summary["delivery"] for summary in summaries]
    what = "Sessions" if all(map(words.of_sessions, summaries)) else "Requests"
    rows = [(f"{what} {title}", [f"{each[key]:,}" for each in found]) for key, title in DELIVERY_COUNTS.items()]
    for key, title in {"rate_per_s": f"{what} per second", "cv": "Variation of the gaps"}.items():
        for side, of in DELIVERY_SIDES.items():
            rows.append((f"{title}, {of}", [words.significant(each[key][side], 4) for each in found]))
    for side in ("due", "sent"):
        checks = [each["ks"][side] for each in found]
        texts = [words.UNKNOWN if check is None else words.significant(check["p_value"], 2) for check in checks]
        rows.append((f"Kolmogorov-Smirnov p, {DELIVERY_SIDES[side]}", texts))
    for figure in ("p50", "p90", "p99", "max"):
        late = [each["late_s"] and each["late_s"][figure] for each in found]
        rows.append((f"Sent late, {figure}", [words.duration(value) for value in late]))
    return [(title, texts) for title, texts in rows if set(texts) != {words.UNKNOWN}]


def length_rows(summaries: Sequence[Summary]) -> list[tuple[int, str, list[str]]]:
    """Run, side, and the tokens asked, the tokens reported, and the answers in which the two differ."""
    return [
        (run, side, [f"{summary['tokens'][f'{key}_{what}']:,}" for what in ("asked", "reported", "mismatches")])
        for run, summary in enumerate(summaries)
        for side, key in (("Prompts", "prompt"), ("Answers", "output"))
    ]


def client_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """What is known about the client of each run, with the limit beyond which it is taken for the bottleneck."""
    limits = {limit.figure: limit for limit in LIMITS}
    rows = []
    for name, title in CLIENT_FIGURES.items():
        limit = limits.get(name)
        values = [limit_text(name, summary["client"][name]) for summary in summaries]
        beyond = ("", "") if limit is None else (limit_text(name, limit.most), limit.meaning)
        rows.append({"title": title, "texts": values, "limit": beyond[0], "meaning": beyond[1]})
    return rows


def environment(run: Run, summary: Summary) -> dict[str, dict[str, str]]:
    """Everything needed to run it again, by heading."""
    facts = summary["run"] | {"prompts made exact by": summary["run"]["prompts"]}
    parts = {
        "Run": {name: facts[name] for name in (*SHOWN, "prompts made exact by", "version")},
        "Server": {name: value for name, value in summary["server"].items() if name != "limits"},
        "Server limits": summary["server"]["limits"],
        "Client host": run.header.host,
    }
    return {title: _texts(values) for title, values in parts.items()}


OVERVIEW = (
    ("output", "tokens/s"),
    ("requests", "/s"),
    ("TTFT p50", "s"),
    ("TTFT p99", "s"),
    ("TPOT p50", "ms"),
    ("ITL p99", "ms"),
    ("E2E p50", "s"),
    ("complete", ""),
)
"""What a page of several runs shows of each at once: latencies are in one unit down a column, to be compared."""
SHOWN = (
    *("started_at", "id", "arrivals", "n", "asked_s", "workload", "input_tokens", "output_tokens"),
    *("seed", "workers", "timeout_s"),
)
CLIENT_FIGURES = {
    "error_bar_s": "Error bar of a stamp",
    "error_bar_ttft_s": "Error bar of TTFT",
    "error_bar_tpot_s": "Error bar of TPOT",
    "error_bar_itl_s": "Error bar of ITL",
    "late_p50_s": "Reads late, median",
    "late_p99_s": "Reads late, p99",
    "late_max_s": "Reads late, largest",
    "coalesced_share": "Reads that held several tokens",
    "send_late_p99_s": "Sends late, p99",
    "stall_max_s": "Longest stall",
    "full_reads": "Reads of a full window",
    "retransmit_share": "Segments sent again, per request",
    "out_of_order_share": "Segments out of order, per read",
    "cpu_share": "Busiest second, of one core",
    "clock_disagreement_s": "Clocks moved apart",
    "clock_step_s": "of which more than slewing explains",
    "first_token_merged": "First tokens not alone in their read",
    "reopened": "Connections opened again",
    "worker_lost": "Requests lost with their worker",
}


DELIVERY_COUNTS = {"asked": "due", "sent": "sent", "not_sent": "not sent"}
"""Of sessions their first turns are meant."""
DELIVERY_SIDES = {"named": "as named", "due": "as due", "sent": "as sent"}


def _sending(summary: Summary) -> dict[str, str]:
    """A burst's skew; of other arrivals the rate that was reached."""
    if summary["run"]["arrivals"] == "burst":
        return _card("Burst skew", *_split(words.duration(summary["burst"]["skew_s"])), words.skew(summary))
    rate = summary["delivery"]["rate_per_s"]
    named = "" if rate["named"] is None else f"{words.significant(rate['named'], 4)} named"
    title = "Sessions begun" if words.of_sessions(summary) else "Load sent"
    return _card(title, words.significant(rate["sent"], 4), "/s", named)


def _overview(summary: Summary, title: str) -> tuple[str, float | None]:
    requests, throughput = summary["requests"], summary["throughput"]
    figure, _, percentile = title.partition(" ")
    if not percentile:
        if title == "complete":
            asked = requests["sent"] + requests["dropped"] + requests["unrecorded"]
            return f"{requests['complete']:,} of {asked:,}", requests["complete"]
        value = throughput["output_tokens_per_s" if title == "output" else "requests_per_s"]
        return words.significant(value, 4), value
    described = summary["latency"][f"{figure.lower()}_s"]
    if percentile in described["thin"]:
        return "n too small", None
    value = described[percentile]
    factor = 1e3 if dict(OVERVIEW)[title] == "ms" else 1.0
    return words.UNKNOWN if value is None else words.significant(value * factor, 4), value


def _trust(kind: str, brief: str, word: str) -> dict[str, str]:
    return {"kind": kind, "brief": brief, "word": word}


def _card(label: str, value: str, unit: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "note": note}


def _median(label: str, described: Summary) -> dict[str, str]:
    value, unit = _split(words.duration(described["p50"]))
    factor, _ = words.scale_of(described["p50"])
    low, high = described["ci95"].get("p50", (None, None))
    if "p50" in described["thin"] or low is None or high is None:
        interval = f"median of {described['n']:,}: too few" if described["n"] else "no sample"
    else:
        interval = f"median, 95 %: {words.significant(low * factor)} to {words.significant(high * factor)}"
    tail = "" if "p99" in described["thin"] or described["p99"] is None else f"; p99 {words.duration(described['p99'])}"
    return _card(label, value, unit, interval + tail)


def _split(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(" ")
    return value, unit


def _cell(described: Summary, figure: str, factor: float) -> dict[str, Any]:
    value = described.get(figure)
    if figure in described.get("thin", ()) or (figure == "p99_9" and value is None and described["n"]):
        needed = f"{samples_needed(PERCENTILES[figure]):,}"
        return {"figure": figure, "value": value, "text": "n too small", "interval": f"needs {needed}", "thin": True}
    low, high = described.get("ci95", {}).get(figure, (None, None))
    known = figure in WITH_INTERVAL and (low is not None or high is not None)
    ends = [words.UNKNOWN if end is None else words.significant(end * factor, 4) for end in (low, high)]
    interval = " to ".join(ends) if known else ""
    text = words.UNKNOWN if value is None else words.significant(value * factor, 4)
    if value is None and described.get("failures"):
        text = "∞"
    return {"figure": figure, "value": value, "text": text, "interval": interval, "thin": False}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    shown = {name: value for name, value in values.items() if value not in (None, "")}
    return {name.removesuffix("_bytes").replace("_", " "): _text(name, value) for name, value in shown.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return ("no", "yes")[value]
    return words.size(value) if name.endswith("_bytes") else str(value)
