"""What the page says of memory and of the server's own counts: rows of values for the template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis import words

Summary = Mapping[str, Any]
LEVELS = ("idle_bytes", "loaded_bytes", "peak_bytes", "total_bytes")
COUNTERS = {
    "requests_finished": "Requests finished",
    "requests_failed": "Requests failed",
    "prompt_tokens": "Prompt tokens",
    "cached_prompt_tokens": "Prompt tokens from the cache",
    "output_tokens": "Output tokens",
    "preemptions": "Preemptions",
    "rejections": "Rejections",
}


def memory_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """One row per GPU, process and host of each run: before, after, at most, and how much there is."""
    return [
        {
            "run": run,
            "of": f"{each['of'][0].upper()}{each['of'][1:]}{_on(each)}",
            "name": each.get("name") or "",
            "levels": [(each.get(level), words.size(each.get(level))) for level in LEVELS],
        }
        for run, summary in enumerate(summaries)
        for each in _measured(summary["memory"])
    ]


def counter_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """One row per counter of each run: what the server counted, what the client did, and whether they agree."""
    return [
        {
            "run": run,
            "title": COUNTERS.get(word, word.replace("_", " ")),
            "server": f"{entry['server']:,}",
            "client": _client(entry),
            "agree": {True: "yes", False: "no", None: words.UNKNOWN}[entry["agree"]],
            "why": entry["why"],
        }
        for run, summary in enumerate(summaries)
        for word, entry in summary["server_counters"].items()
    ]


def not_measured(summary: Summary) -> dict[str, str]:
    """What could not be read, and why."""
    found = summary["memory"]
    gaps = {
        source: "; ".join(f"{words.count(number, 'reading')} failed: {reason}" for reason, number in reasons.items())
        for source, reasons in found.get("gaps", {}).items()
    }
    return {**{str(what): str(why) for what, why in found.get("not_measured", {}).items()}, **gaps}


def _measured(memory: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if memory:
        yield from memory["gpus"]
        yield from memory["processes"]
        yield from [memory["host"]] if memory["host"] else []


def _on(each: Mapping[str, Any]) -> str:
    return f" on {each['on']}" if each.get("on", "host") != "host" else ""


def _client(entry: Mapping[str, Any]) -> str:
    if entry["client"] is None:
        return words.UNKNOWN
    return f"{entry['client']:,}" + ("" if entry["client_most"] is None else f" to {entry['client_most']:,}")
