"""Figures and facts in words: one wording for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Summary = Mapping[str, Any]

UNKNOWN = "–"  # noqa: RUF001 - a dash in a table cell, typeset as one
_SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "µs"), (0.0, 1e9, "ns"))
COUNTED = {"prompt_tokens": "prompt tokens", "output_tokens": "output tokens", "requests_finished": "finished requests"}
"""What server and client both count."""
NAMES = {
    "ttft_s": "TTFT",
    "ttft_due_s": "TTFT from due",
    "tpot_s": "TPOT",
    "icl_s": "ICL",
    "itl_s": "ITL",
    "e2e_s": "E2E",
    "e2e_due_s": "E2E from due",
    "e2e_stream_s": "E2E to end mark",
    "e2e_asked_s": "E2E at length asked",
    "normalised_s": "Normalised",
}


def significant(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits and thousands separated; never in exponent notation."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = max(0, digits - 1 - exponent)
    return f"{value:,.{decimals}f}"


def scale_of(seconds: float | None) -> tuple[float, str]:
    """Factor and unit in which this duration reads best, from s to ns."""
    size = abs(seconds or 0.0)
    if size == 0:
        return 1e3, "ms"
    return next((factor, unit) for least, factor, unit in _SCALES if size >= least)


def duration(seconds: float | None, digits: int = 3) -> str:
    """A duration in the unit in which it reads best."""
    if seconds is None:
        return UNKNOWN
    factor, unit = scale_of(seconds)
    return f"{significant(seconds * factor, digits)} {unit}"


def skew(summary: Summary) -> str:
    """What a burst's skew is, and what the clocks of several machines leave open of it."""
    if bounds := summary["burst"].get("skew_range_s"):
        return f"{duration(bounds[0])} to {duration(bounds[1])}, as far as clocks tell"
    return "from the first byte sent to the last"


def machines(summary: Summary) -> str:
    """Over which machines a run was spread, and how well their clocks are known; empty for one machine."""
    if not (spread := summary.get("machines")):
        return ""
    each = ", ".join(f"{machine['name']} ±{duration(machine['uncertainty_s'])}" for machine in spread)
    return f"{count(len(spread), 'machine')}, clocks known to: {each}."


def share(value: float | None) -> str:
    """A share as a percentage."""
    return UNKNOWN if value is None else f"{significant(value * 100, 2)} %"


def size(number: float | None, digits: int = 3) -> str:
    """Bytes in the unit in which they read best: GiB and MiB, as the drivers' own tools count."""
    if number is None:
        return UNKNOWN
    factor, unit = (2**30, "GiB") if number >= 2**30 else (2**20, "MiB")
    return f"{significant(number / factor, digits)} {unit}"


def count(number: int, noun: str) -> str:
    """`1 request`, `1,000 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def simulated(summary: Summary) -> str:
    """`SIMULATED`, with the speed of its clock where that is not 1; empty for a real server."""
    server = summary["server"]
    if not server["simulated"]:
        return ""
    speed = server["speed"]
    return "SIMULATED" if speed in (None, 1) else f"SIMULATED at {speed:g} times speed"


def who(summary: Summary) -> str:
    """The server, its version, and what it runs on where that was said."""
    server = summary["server"]
    name = " ".join(str(part) for part in (server["name"], server["version"]) if part)
    return f"{name} on {platform}" if (platform := server.get("platform")) else name


def started(summary: Summary) -> str:
    """When the run began, in UTC; as it stands in the run file where that is not a time."""
    text = str(summary["run"]["started_at"])
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return text


def endings(summary: Summary) -> str:
    """How the requests ended, in one sentence."""
    requests = summary["requests"]
    never = requests["errors"].get("session_ended", 0)
    counts = {**requests, "dropped": requests["dropped"] - never}
    parts = [f"{counts[state]:,} {state}" for state in ("failed", "truncated", "dropped") if counts[state]]
    if never:
        parts.append(f"{never:,} never sent, as {'its' if never == 1 else 'their'} session had ended")
    if requests["unrecorded"]:
        parts.append(f"{requests['unrecorded']:,} without a record")
    total = requests["sent"] + requests["dropped"] + requests["unrecorded"]
    if not total:
        return "Nothing was sent."
    if not parts:
        return f"All {total:,} requests were complete."
    return f"{requests['complete']:,} of {total:,} requests were complete; {', '.join(parts)}."


def all_complete(summary: Summary) -> bool:
    """Whether every request asked for was sent and came back whole."""
    requests = summary["requests"]
    return bool(requests["complete"] == requests["sent"] + requests["dropped"] + requests["unrecorded"])


def unit_of(figure: str, value: float | None) -> tuple[float, str]:
    """Factor and unit in which a figure reads best, by its name as --assert knows it."""
    if figure.partition(".")[0] == "goodput":
        return 1.0, "requests/s"
    if figure in ("complete", "attainment") or figure.endswith("_share"):
        return 100.0, "%"
    if figure.endswith("_per_s"):
        return 1.0, "requests/s" if figure.startswith("requests") else "tokens/s"
    return scale_of(value)


def lengths(summary: Summary) -> str:
    """Whether prompts and answers had the lengths asked for, by the server's own count."""
    tokens = summary["tokens"]
    if summary["requests"]["complete"] == 0:
        return "No answer is complete, so no length was checked."
    prompts, outputs = tokens["prompt_mismatches"], tokens["output_mismatches"]
    if tokens["prompt_unreported"]:
        prompt = f"{count(tokens['prompt_unreported'], 'answer')} did not say how long the prompt was"
    else:
        prompt = f"{count(prompts, 'prompt')} of another length than asked" if prompts else "Every prompt was exact"
        if later := tokens.get("prompt_unknown"):
            prompt += f" ({count(later, 'prompt')} held answers, whose length nobody knew)"
    output = f"{count(outputs, 'answer')} of another length than asked" if outputs else "every answer as long as asked"
    return f"{prompt}; {output}."


def believe(summary: Summary) -> str:
    """The client's verdict on itself and the error bar of its stamps."""
    client = summary["client"]
    stamps = "the kernel" if client["stamps"] == "kernel" else "the program itself, not the kernel"
    bar = f"stamps by {stamps}, {error_bars(client)}"
    verdict = (
        "The client kept up" if client["verdict"] == "ok" else "The client, not the server, may have been the limit"
    )
    return f"{verdict}: {bar}{calibrated(summary)}."


def error_bars(client: Mapping[str, Any]) -> str:
    """That of a token alone in its read; of TTFT, TPOT and ITL where tokens that were not make them wider."""
    alone_s = client["error_bar_e2e_s"]
    if alone_s is None:
        return "error unknown"
    if client["error_bar_ttft_s"] <= alone_s and client["error_bar_itl_s"] <= 2 * alone_s:
        return f"error bar ±{duration(alone_s, 2)}"
    bars = {name: client[f"error_bar_{name}_s"] for name in ("ttft", "tpot", "itl")}
    said = ", ".join(f"{name.upper()} ±{duration(bar, 2)}" for name, bar in bars.items() if bar is not None)
    return f"error bars {said} (several tokens came in one read)"


def calibrated(summary: Summary) -> str:
    """What `loadgen calibrate` had found on the machine before this run, as the end of a sentence; empty if nothing."""
    found = summary["client"]["calibration"]
    if found is None:
        return ""
    rate = f", {found['events_per_s']:,.0f} events/s" if found["events_per_s"] else ""
    return f"; calibrated here on {found['made_at'][:10]}: TTFT ±{duration(found['ttft_p99_s'], 2)} at p99{rate}"


def window(summary: Summary) -> str:
    """What stretch of the run the figures are of, and why; nothing for a whole run."""
    found = summary["window"]
    if found["chosen"] == "whole" or found["from_s"] is None:
        return ""
    ends = f"{significant(found['from_s'])} s to {significant(found['to_s'])} s"
    within = f"{count(found['requests'], 'request')} {'was' if found['requests'] == 1 else 'were'} due within"
    return f"Measured from {ends} of the run ({found['reason']}); {within}."


def of_sessions(summary: Summary) -> bool:
    """Whether arrivals and the number asked count sessions of several turns."""
    return (summary["run"]["workload"] or "").startswith("multi-turn")


def counters(summary: Summary) -> str:
    """That the server counted the same, where it did; disagreement is a warning."""
    same = [COUNTED[word] for word in COUNTED if summary["server_counters"].get(word, {}).get("agree")]
    if not same:
        return ""
    warmup = summary["requests"]["warmup"]
    included = f", {count(warmup, 'warm-up request')} included" if warmup else ""
    return (
        f"The server counted the same {' and '.join([', '.join(same[:-1]), same[-1]] if same[1:] else same)}{included}."
    )


def _disagreements(summary: Summary) -> list[str]:
    found = []
    for word, title in COUNTED.items():
        entry = summary["server_counters"].get(word, {})
        if entry.get("agree") is False:
            most = "" if entry["client_most"] is None else f" to {entry['client_most']:,}"
            ours = f"the client {entry['client']:,}{most}"
            found.append(f"The server counted {entry['server']:,} {title}, {ours}: {entry['why']}.")
    return found


def objective(entry: Mapping[str, Any]) -> str:
    """An objective, what was measured, and what that leaves out."""
    out = f"; {count(entry['left_out'], 'request')} not complete and left out" if entry["left_out"] else ""
    return f"{entry['objective']}: {entry['said']}{out}"


def rate_interval(summary: Summary, rate: str) -> str:
    """The 95 % interval of a rate; empty where the run cannot tell it."""
    ends = summary["throughput"]["ci95"].get(rate)
    return f"95 %: {significant(ends[0], 4)} to {significant(ends[1], 4)}" if ends else ""


def tail(summary: Summary) -> str:
    """How exactly output throughput is known and was timed, and how much of the time the server was running empty."""
    figures = summary["throughput"]
    parts = {"timed to ±{}": figures["error_share"], "{} of it was tail": figures["tail_share"]}
    said = [text.format(share(value)) for text, value in parts.items() if value is not None]
    if steady := figures.get("steady_output_tokens_per_s"):
        said.append(f"{significant(steady, 4)} before it")
    return "; ".join(filter(None, (rate_interval(summary, "output_tokens_per_s"), *said)))


def burst_intervals(summary: Summary) -> str:
    """What the intervals of a burst are of, in a line; empty for other runs."""
    if summary["run"]["arrivals"] != "burst" or not summary["requests"]["complete"]:
        return ""
    return "Requests share one queue: only --repeats shows how another burst would differ."


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before using a figure of this run."""
    run, client = summary["run"], summary["client"]
    found = [f"{reason[0].upper()}{reason[1:]}." for reason in client["reasons"]]
    if run.get("forced"):
        found.append(f"Measured with --force: {run['forced']}.")
    if run["interrupted"]:
        found.append("The run was interrupted: figures are of the part that was kept.")
    if run["damaged_lines"]:
        found.append(f"{count(run['damaged_lines'], 'damaged line')} of the run file left out.")
    if client["first_token_merged"]:
        merged = f"{client['first_token_merged']:,} of {summary['requests']['sent']:,} first tokens"
        found.append(f"{merged} came together with later ones: those TTFTs are upper bounds.")
    if client["reopened"]:
        found.append(f"{count(client['reopened'], 'connection')} had been closed by the server and opened again.")
    return [*found, *_disagreements(summary), *(f"{note}." for note in run["notes"])]
