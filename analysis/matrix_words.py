"""A matrix in words: one wording for the terminal and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from analysis import words
from analysis.matrix import FIGURES

Found = Mapping[str, Any]

TITLES = {"vllm": "vLLM", "tgi": "TGI", "lightllm": "LightLLM", "openai": "OpenAI-style"}
BY_NAME = {figure.name: figure for figure in FIGURES}
MAIN = "output_tokens_per_s"


def title(found: Found) -> str:
    """What was measured, in one line."""
    servers, platforms, models, workloads = (
        words.count(len(found[f"{kind}s"]), {"host": "platform"}.get(kind, kind))
        for kind in ("server", "host", "model", "workload")
    )
    repeats = words.count(found["repeats"], "repeat")
    return f"{found['name']}: {servers} on {platforms}, {models}, {workloads}, {repeats} each"


def mark(found: Found) -> str:
    """SIMULATED if any cell was, with the speed of the clock."""
    speeds = sorted({cell["speed"] for cell in found["cells"] if cell["simulated"] and cell["speed"] not in (None, 1)})
    if not found["simulated"]:
        return ""
    return f"SIMULATED at {' and '.join(f'{speed:g}' for speed in speeds)} times speed" if speeds else "SIMULATED"


def server_title(server: Mapping[str, str]) -> str:
    """A server's own name in its usual spelling, or the name that the plan gives it."""
    return TITLES[server["server"]] if server["name"] == server["server"] else server["name"]


def server_of(found: Found, name: str) -> str:
    """The title of the server of this name."""
    return next(server_title(each) for each in found["servers"] if each["name"] == name)


def platform_of(found: Found, host: str) -> str:
    """The title of the host of this name."""
    return next(str(each["title"]) for each in found["hosts"] if each["name"] == host)


def group_title(found: Found, group: tuple[str, str]) -> str:
    """A model and a workload; the workload only where there are several."""
    return f"{group[0]}, {group[1]}" if len(found["workloads"]) > 1 else group[0]


def cell_of(found: Found, cell: Found) -> str:
    """A cell's name."""
    return (
        f"{server_of(found, cell['server'])} on {platform_of(found, cell['host'])}, {cell['model']}, {cell['workload']}"
    )


def figure(name: str, figures: Found) -> str:
    """A figure over the repeats: its mean, and the interval of the mean where there is one."""
    each = figures[name]
    if each["mean"] is None:
        return words.UNKNOWN
    factor, unit = words.scale_of(each["mean"]) if BY_NAME[name].unit == "s" else (1.0, BY_NAME[name].unit)
    return f"{words.significant(each['mean'] * factor, 4)} {unit}"


def interval(name: str, figures: Found) -> str:
    """The interval of a figure's mean, in the unit that `figure` writes; empty where there is none."""
    each = figures[name]
    if each["mean"] is None or each["ci95"] is None:
        return ""
    low, high = each["ci95"]
    factor, _ = words.scale_of(each["mean"]) if BY_NAME[name].unit == "s" else (1.0, "")
    return f"{words.significant(max(0.0, low) * factor, 4)} to {words.significant(high * factor, 4)}"


def sentences_of_all(found: Found) -> list[str]:
    """`sentences` of every model and workload, each named where there are several."""
    groups = list(dict.fromkeys((cell["model"], cell["workload"]) for cell in found["cells"] if cell["runs"]))
    return [
        f"{group_title(found, group)}, {line}" if len(groups) > 1 else line
        for group in groups
        for line in sentences(found, group)
    ]


def sentences(found: Found, group: tuple[str, str]) -> list[str]:
    """On each platform the server with the largest output throughput, and whether that is more than noise."""
    lines = []
    for host in found["hosts"]:
        cells = [
            cell
            for cell in found["cells"]
            if (cell["model"], cell["workload"]) == group and cell["host"] == host["name"] and _rate(cell) is not None
        ]
        ordered = sorted(cells, key=lambda cell: -(_rate(cell) or 0))
        if len(ordered) > 1:
            lines.append(_sentence(found, host["title"], ordered))
        elif ordered:
            only = ordered[0]
            lines.append(f"{host['title']}: only {server_of(found, only['server'])}, {figure(MAIN, only['figures'])}.")
    return lines


def _rate(cell: Found) -> float | None:
    rate: float | None = cell["figures"][MAIN]["mean"]
    return rate


def _sentence(found: Found, platform: str, ordered: Sequence[Found]) -> str:
    first, second = ordered[:2]
    others = ", ".join(f"{server_of(found, cell['server'])} {figure(MAIN, cell['figures'])}" for cell in ordered[1:])
    text = f"{platform}: {server_of(found, first['server'])} {figure(MAIN, first['figures'])}; {others}."
    told = next(
        (each for each in found["differences"] if each["figure"] == MAIN and _is_of(each, first, second)),
        {"verdict": "cannot tell", "equal_work": True},
    )
    names = f"{server_of(found, first['server'])} and {server_of(found, second['server'])}"
    if told["verdict"] == "no difference seen":
        text += f" Between {names} the difference is no larger than the noise between runs."
    if told["verdict"] == "different":
        text += f" The lead of {server_of(found, first['server'])} is larger than the noise between runs."
    if not told["equal_work"]:
        text += f" {names} did unequal work: their answers are not of the same length."
    return text


def _is_of(difference: Found, one: Found, other: Found) -> bool:
    """Whether a difference is that between these two cells."""
    cells = (difference["a"], difference["b"])
    return all(any(all(each[part] == cell[part] for part in each) for each in cells) for cell in (one, other))


def chart_text(found: Found, cells: Sequence[Found], kind: str) -> list[str]:
    """What a chart of end-to-end latencies says, one line per curve."""
    lines = []
    for cell in cells:
        name = server_of(found, cell["server"]) if kind == "host" else platform_of(found, cell["host"])
        half, most = (figure(which, cell["figures"]) for which in ("e2e.p50", "e2e.p99"))
        beyond = "too few requests for p99" if most == words.UNKNOWN else f"99 % within {most}"
        lines.append(f"{name}: E2E of half within {half}, {beyond}.")
    return lines


def beliefs(found: Found) -> list[dict[str, Any]]:
    """Whether to believe it: sentences, each good or not."""
    cells = found["cells"]
    states = Counter(cell["state"] for cell in cells)
    runs = sum(len(cell["runs"]) for cell in cells)
    planned = sum(cell["planned"] for cell in cells)
    whole = states["measured"] == len(cells)
    missing = ", ".join(f"{number} {state}" for state, number in states.items() if state != "measured")
    measured = f"{states['measured']} of {words.count(len(cells), 'cell')} measured, {runs} of {planned} runs"
    lines = [{"good": whole, "text": f"{measured}{'; ' + missing if missing else ''}."}]
    requests = sum((Counter(cell["requests"]) for cell in cells), Counter[str]())
    ended = ", ".join(f"{requests[state]:,} {state}" for state in ("truncated", "failed", "dropped") if requests[state])
    complete = requests["complete"] == requests["sent"] + requests["dropped"]
    lines.append(
        {
            "good": complete and runs > 0,
            "text": f"{requests['complete']:,} of {requests['sent'] + requests['dropped']:,} requests complete"
            f"{'; ' + ended if ended else ''}.",
        }
    )
    limited = sum(cell["verdicts"].get("limited", 0) for cell in cells)
    text = f"In {limited} of {runs} runs the client, not the server, may have been the limit." if limited else ""
    lines.append({"good": not limited, "text": text or f"The client kept up in all {runs} runs."})
    differ = [cell for cell in cells if cell["lengths"]["differ"]]
    if differ:
        names = ", ".join(dict.fromkeys(server_of(found, cell["server"]) for cell in differ))
        lines.append({"good": False, "text": f"Answers of {names} had other lengths than asked: see Lengths."})
    if found["interrupted"]:
        lines.append({"good": False, "text": "The matrix was interrupted; --resume goes on with it."})
    return lines


def order(found: Found) -> list[str]:
    """How the runs were spread over time, and what that is good for."""
    rounds = found["starts"]
    lines = [
        f"Each server was started {words.count(rounds, 'time')} per host and model, and its runs were shuffled within "
        f"a start (seed {found['seed']}); repeat k of every cell has the same prompts."
    ]
    if rounds > 1:
        lines.append(
            "The starts went in rounds, each with every server once in random order, so whatever drifted over time "
            "fell on all of them alike, and what differs from start to start is in the intervals."
        )
    else:
        lines.append(
            "One start per server: its repeats followed one another, so a drift over time, or what differs from start "
            "to start, is not in the intervals. More starts (starts in the plan) would show it."
        )
    lines.append("The first run after a start is cold: the server has served nothing but the warm-up requests.")
    if found["equal_work"]:
        leader = server_of(found, found["equal_work"]["server"])
        lines.append(f"Because of equal work, {leader} came first in each round.")
    return lines


def equal_work(found: Found) -> str:
    """That the others were given one server's output lengths; empty where they were not."""
    if not found["equal_work"]:
        return ""
    leader = server_of(found, found["equal_work"]["server"])
    return (
        f"Equal work: {leader} was measured first, and the other servers were asked for output lengths drawn from "
        f"those that its complete answers had, on the same host with the same model under the same workload."
    )
