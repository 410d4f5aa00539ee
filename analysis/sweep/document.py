"""Builds the terminal summary of a sweep, and the HTML page that shows the frontier of one or several sweeps.

A step of a sweep is the run at one load. On the page, every figure of a step links to the report of this run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

from loadgen.analysis import report as doc
from loadgen.analysis.format import (
    UNKNOWN,
    confidence_interval,
    duration,
    interval_text,
    percent,
    pluralise,
    significant,
    times_speed,
)
from loadgen.analysis.prices import currency_parts, format_price
from loadgen.analysis.report import (
    Block,
    Card,
    Cards,
    ChartRef,
    ColumnKind,
    Document,
    Finding,
    Paragraph,
    RunStyle,
    Section,
    Switch,
    TableCell,
    status,
)
from loadgen.analysis.report.charts import DASHES, PALETTE
from loadgen.analysis.report.tables import Cells, number_columns, table
from loadgen.analysis.sweep import (
    RATE,
    SweepResult,
    SweepStep,
    best_step,
    throughput_field,
    verdict_of,
)

VIRTUAL = "SIMULATED (virtual)"
"""The mark of a sweep in virtual time, in which no client took part."""
UNITS = {"rate": "requests/s", "concurrency": "at a time"}
LOADS = {"rate": "request rate, requests/s", "concurrency": "concurrency, requests at a time"}
FRONTIER = """Each point is the run at one load, and its number is this load. Right and up is better. Click a point to
open its run."""
SEVERAL = "The grey line joins the points that no other point shown here beats in both figures (the Pareto frontier)."
BRACKET = "The capacity lies between the two loads that the broad line joins."
STAR = "The star is the load that {cards}."
LIMIT = "The dotted line is what the hardware allows at most with the same number of requests in flight."
OVERLOADS = "Not drawn: {} of an overloaded server, ended early."
PER_USER = "Speed per user is 1 / median TPOT: the tokens per second that one user sees."
FIRST = (
    "Left and up is better: an earlier first token, and more tokens from the same GPUs. Symbols as in the chart above."
)
WHOLE_SERVERS = "Tokens per second are those of whole servers: the number of GPUs is unknown. Set it with --gpus N."
GOODPUT = "Requests per second that individually met the objectives."
REQUESTED = "The grey line is the rate that was sent."
PREDICTED = "The dashed line is the predicted rate of complete requests."
COMPLETE = "Complete requests per second."
BAND = "The shaded loads are the interval of the capacity."
VERDICTS = {"overload": "overload, ended early"}
STABILITY_VERDICTS = {
    "met": "keeps up",
    "inconclusive": "unclear",
    "not met": "queue grows",
    "overload": "queue grows, ended early",
}
"""Verdicts of a search without objectives."""
ENDED = {
    "runs": "The maximum number of runs (`--max-runs`) was reached; use `--resume` with a larger one to narrow the "
    "interval.",
    "time": "`--max-time` was reached; use `--resume` to continue.",
    "client": "The client was the limit, so the capacity may be higher.",
    "interrupted": "The sweep was interrupted; use `--resume` to continue.",
}
MEANINGS = (
    ("tokens/s per user", "1 / TPOT", "The speed at which a user sees a response: the median over requests."),
    ("tokens/s", "", "Output tokens per second in the measurement window; per GPU if the number of GPUs is known."),
    (
        "knee",
        "",
        "The load with the largest ratio of requests/s and median E2E latency (Kleinrock, 1979). It may miss "
        "an objective.",
    ),
    (
        "capacity",
        "",
        "The largest load at which all objectives hold, with its interval at the stated confidence. Without "
        "objectives: the largest rate at which no queue grows.",
    ),
    ("P(over)", "", "The probability, from this run alone, that an objective fails at this load in the long run."),
)
COMPARED = ("tokens_per_s_per_user", "cost_per_million_tokens", "joules_per_token")
Links = Callable[[SweepResult, str], str]
"""Function that returns the link from the page to the report of a step. It takes the sweep and the step's folder."""


def format_load(over: str, load: float | None) -> str:
    """Format `load`, a load of a sweep. `over` states what the load is: a request rate or a concurrency.

    A concurrency is formatted as a whole number, and a request rate with three significant digits.
    """
    return f"{load:,.0f}" if over == "concurrency" and load is not None else significant(load)


def capacity_sentence(sweep: SweepResult) -> str:
    """Return a sentence that states the capacity and its confidence interval."""
    unit = UNITS[sweep.over]
    low, high = format_load(sweep.over, sweep.capacity_low), format_load(sweep.over, sweep.capacity_high)
    condition = f" with {' and '.join(sweep.objectives)}" if sweep.objectives else ""
    if sweep.state is None and sweep.fixed_loads:
        return f"{pluralise(len(sweep.steps), 'load')} measured, without objectives."
    if sweep.state == "below":
        return f"{' and '.join(sweep.objectives)}: not met even at the lowest load, {high} {unit}."
    if sweep.capacity is None:
        subject = f"{' and '.join(sweep.objectives)}: t" if sweep.objectives else "T"
        limit = "" if sweep.capacity_high is None else f"; it is below {high} {unit}"
        return f"{subject}he capacity is not known yet{limit}."
    if sweep.capacity_high is None:
        return f"Capacity: at least {low} {unit}{condition}; no load violated that."
    rough = "" if _is_settled(sweep) else " The interval is wider than requested (--precision)."
    between = _measured_bracket(sweep)
    if sweep.fixed_loads:
        return f"Capacity: {between} {unit}{condition}."
    meaning = "" if sweep.objectives else ": the largest rate that the server keeps up with"
    confidence = f"{sweep.confidence:.0%}"
    measured = f", {between}" if between and sweep.over == "concurrency" else ""
    capacity = format_load(sweep.over, sweep.capacity)
    interval = f"{confidence} CI {interval_text(low, high)}"
    times_plan = ""
    if sweep.plan_load:
        factor, *ends = (
            significant((load or 0) / sweep.plan_load)
            for load in (sweep.capacity, sweep.capacity_low, sweep.capacity_high)
        )
        times_plan = f" The capacity is {factor} times the load of the plan ({confidence} CI {interval_text(*ends)})."
    return f"Capacity: {capacity} {unit} ({interval}){measured}{condition}{meaning}.{times_plan}{rough}"


def _measured_bracket(sweep: SweepResult) -> str:
    """Return the nearest measured loads below and above the capacity: `between 32 (met) and 64 (not met)`.

    Return an empty string if no load below the capacity was measured, or no load above it.
    """
    ends = _bracket(sweep)
    if ends is None:
        return ""
    texts = [f"{format_load(sweep.over, step.load)} ({_bracket_word(step)})" for step in ends]
    return f"between {' and '.join(texts)}"


def _bracket(sweep: SweepResult) -> tuple[SweepStep, SweepStep] | None:
    """Return the steps (runs at one load) next to the capacity: the nearest one below and the nearest one above.

    Return None if no step below the capacity was measured, or no step above it.
    """
    above = next((step for step in sweep.steps if step.over > 0.5), None)
    below = [step for step in sweep.steps if step.over <= 0.5 and (above is None or step.load < above.load)]
    return None if above is None or not below else (below[-1], above)


def _bracket_word(step: SweepStep) -> str:
    """Return the verdict on a step of a sweep as text, such as `met` or `not met`.

    A step is a run at one load. If the server was overloaded, the result is `not met`.
    """
    return "not met" if step.verdict == "overload" else step.verdict


def verdict_text(chance: float, *, overloaded: bool, objectives: bool) -> str:
    """Return the verdict on a step (the run at one load), for the line that is printed when the step ends.

    `chance` is the probability that the load exceeds the capacity. `objectives` is True if the sweep has objectives.
    """
    if not objectives:
        return STABILITY_VERDICTS[verdict_of(chance)]
    return "overload, stopped early" if overloaded else f"P(over capacity) {format_chance(chance)}"


def format_chance(over: float) -> str:
    """Return the probability `over` as a text: a whole percentage, or `< 1%` or `> 99%` for values near 0 and 1."""
    if over < 0.01:
        return "< 1%"
    return "> 99%" if over > 0.99 else f"{100 * over:.0f}%"


def findings(sweep: SweepResult) -> list[Finding]:
    """Return the findings on a sweep. The first finding states the capacity, and the others state limitations."""
    settled = _is_settled(sweep)
    results = [Finding("capacity", "ok" if settled else "warning", capacity_sentence(sweep), "steps")]
    if sweep.model_accuracy:
        results.append(Finding("accuracy", "note", f"Accuracy of the model: {sweep.model_accuracy}.", "steps"))
    if sweep.ended in ENDED:
        level: doc.Level = "note" if settled else "warning"
        if sweep.ended == "client":
            level = "error"
        results.append(Finding("ended", level, ended_sentence(sweep)))
    if sweep.speed != 1:
        text = f"No energy or cost: the server ran{times_speed(sweep.speed)}. Use --speed 1 to get them."
        results.append(Finding("speed", "note", text))
    return results


def ended_sentence(sweep: SweepResult) -> str:
    """Return a sentence that explains why a sweep ended early.

    If the sweep ended because the client was the limit, the sentence also states what limited the client.
    """
    if sweep.ended != "client":
        return ENDED[sweep.ended]
    limited = next((step for step in reversed(sweep.steps) if step.client == "limited" and step.client_reasons), None)
    cause = "" if limited is None else f" At {format_load(sweep.over, limited.load)} {UNITS[sweep.over]}: "
    return ENDED["client"] + (f"{cause}{'; '.join(limited.client_reasons)}." if limited else "")


def _verdict(step: SweepStep, sweep: SweepResult) -> str:
    """Return the verdict on a step (the run at one load) in words.

    Without objectives and without a search, the result is an empty string unless the server was overloaded.
    """
    if sweep.state is not None and not sweep.objectives:
        return STABILITY_VERDICTS[step.verdict]
    return VERDICTS.get(step.verdict, step.verdict)


def _remarks(step: SweepStep, sweep: SweepResult) -> str:
    """Return a table cell about a step: its verdict, its number of rejected requests, and the word `knee`.

    The knee is the step of the sweep with the largest ratio of request throughput to median E2E latency. Only its cell
    contains the word.
    """
    rejections = f"{step.rejected:,} rejected" if step.rejected else ""
    remarks = "; ".join(filter(None, [_verdict(step, sweep), rejections]))
    return ", ".join(filter(None, [remarks, "knee" if step.step == sweep.knee else ""]))


def _is_settled(sweep: SweepResult) -> bool:
    """Return True if the sweep reached its goal, else False.

    The goal depends on the sweep:

    - Search for the capacity: the interval of the capacity is as narrow as requested, or no further load would be
      useful.
    - Fixed list of loads with objectives: the capacity lies between two loads of the list.
    - Fixed list of loads without objectives: there is no capacity to find, so the result is always True.
    """
    if sweep.state is None:
        return sweep.fixed_loads
    return sweep.state == "found" or (sweep.state == "open" and sweep.ended == "done")


def terminal_document(sweep: SweepResult) -> Document:
    """Return the terminal summary of a sweep."""
    heads: dict[str, ColumnKind] = {
        "step": "head",
        **number_columns("load", throughput_title(sweep), "per user", "TTFT p99", "TPOT p99"),
        _verdict_title(sweep): "text",
    }
    field = throughput_field([sweep])
    rows: list[Cells] = [
        (
            f"{step.step}",
            format_load(sweep.over, step.load),
            significant(getattr(step, field)),
            significant(step.tokens_per_s_per_user),
            duration(step.ttft_p99_s),
            duration(step.tpot_p99_s),
            _remarks(step, sweep),
        )
        for step in sweep.steps
    ]
    steps = table("Steps, by load", heads, rows, several=True)
    blocks = [doc.Findings(findings(sweep)), *_cards(sweep, lambda _sweep, _folder: ""), steps]
    section = Section("answer", "", blocks)
    return Document("loadgen sweep", sweep.name, [section], sweep.model or "", sweep.mark, [RunStyle(sweep.name)])


def _verdict_title(sweep: SweepResult) -> str:
    """Return the title of the table column with the verdict on each step of the sweep.

    - `objectives`: the sweep has objectives, and the verdict says whether they were met.
    - `the server`: there are no objectives, and the verdict says whether the server kept up.
    - `remarks`: the sweep is a fixed list of loads without objectives. There are no verdicts, only remarks.
    """
    if sweep.objectives:
        return "objectives"
    return "remarks" if sweep.state is None else "the server"


def frontier_document(sweeps: Mapping[str, SweepResult], link: Links) -> Document:
    """Return the page of one or several sweeps. Its frontier chart shows throughput against the output speed per user.

    The keys of `sweeps` are the names that the page shows.
    """
    results, several = list(sweeps.values()), len(sweeps) > 1
    styles = [RunStyle(name, colour, sweep.mark) for (name, sweep), colour in zip(sweeps.items(), cycle(PALETTE))]
    answers: list[Block] = [*best_cards(sweeps, link), _comparison(sweeps, link)] if several else []
    for index, sweep in enumerate(results):
        # Chips, cards and table state the capacity. A sweep without a good load has a sentence instead.
        limitations = [finding for finding in findings(sweep) if finding.id != "capacity" or best_step(sweep) is None]
        answers += [Paragraph("", run=index)] if several and limitations else []
        answers += [doc.Findings(limitations)] if limitations else []
        answers += [] if several else _cards(sweep, link)
    mixed = len({sweep.over for sweep in results}) > 1
    if mixed:
        answers.append(
            Paragraph("Request rates and concurrencies are different kinds of load; compare tokens instead.")
        )
    per = " per GPU" if throughput_field(results) == RATE else ""
    if not per:
        answers.append(Paragraph(WHOLE_SERVERS))
    steps = list[Block]()
    for index, sweep in enumerate(results):
        steps += [Paragraph("", run=index)] if several else []
        steps.append(_steps(sweep, throughput_field(results), link))
    title = f"{pluralise(len(sweeps), 'sweep')}" if several else next(iter(sweeps))
    unit = "load" if mixed else LOADS[results[0].over]
    sections = [
        Section("answer", "Capacity", answers),
        _frontier_section(sweeps, per),
        Section(
            "load",
            "TTFT and goodput",
            [
                ChartRef("first", f"Throughput{per} against TTFT", [FIRST], "", "none"),
                ChartRef("goodput", "Goodput by load", _goodput_caption(results), "", "none"),
            ],
        ),
        Section("steps", "Steps", [doc.Disclosure("", steps)] if several else steps),
        Section("words", "What the terms mean", [doc.Disclosure("", [doc.Definitions(MEANINGS)])], "Terms"),
    ]
    mark = next((sweep.mark for sweep in results if sweep.mark), "")
    data = {"runs": _chart_data(sweeps, link), "load": unit, "per": per}
    return Document(
        "loadgen sweep",
        title,
        sections,
        _subtitle(results),
        mark,
        styles,
        ["frontier.js"],
        data,
        results[0].version,
        chips=_chips(results),
    )


def _subtitle(sweeps: Sequence[SweepResult]) -> str:
    """Return what all sweeps have in common: the model, the lengths of the requests, and the objectives."""
    facts = ([sweep.model or "", sweep.workload, " and ".join(sweep.objectives)] for sweep in sweeps)
    return "; ".join(values[0] for values in zip(*facts, strict=True) if values[0] and len(set(values)) == 1)


def _chips(sweeps: Sequence[SweepResult]) -> list[doc.Chip]:
    """Return the chips of the status strip at the top of the page.

    There are chips for the number of valid steps (runs at one load), for the capacity, for the objectives, and for the
    requests at loads within the capacity.
    """
    steps = [step for sweep in sweeps for step in sweep.steps]
    valid = sum(step.client == "ok" for step in steps)
    validity: doc.Level = "ok" if valid == len(steps) else "error"
    simulated = " (simulated server)" if all(sweep.mark not in ("", VIRTUAL) for sweep in sweeps) else ""
    text = f"{valid:,} of {pluralise(len(steps), 'step')} valid{simulated}"
    chips = [doc.Chip("Measurement", text, validity)]
    if valid == len(steps) and all(sweep.mark == VIRTUAL for sweep in sweeps):
        chips = [status.MODELLED]
    return [*chips, _capacity_chip(sweeps), *_objectives_chip(sweeps), *_requests_chip(sweeps)]


def _capacity_chip(sweeps: Sequence[SweepResult]) -> doc.Chip:
    """Return the chip with the main result of one or more sweeps.

    - One sweep: its capacity, or the number of measured loads if the sweep does not search for the capacity.
    - Several sweeps: for how many of them the capacity is less exact than requested.
    """
    settled = sum(map(_is_settled, sweeps))
    level: doc.Level = "ok" if settled == len(sweeps) else "warning"
    if len(sweeps) > 1:
        text = f"found for all {len(sweeps)} sweeps"
        if settled < len(sweeps):
            text = f"less exact than requested for {len(sweeps) - settled} of {len(sweeps)} sweeps"
        return doc.Chip("Capacity", text, level, "steps")
    (sweep,) = sweeps
    rough = "" if settled else "; less exact than requested"
    if sweep.state is None:
        return doc.Chip("Loads", f"{pluralise(len(sweep.steps), 'load')} measured{rough}", level, "steps")
    if sweep.state == "below":
        high = format_load(sweep.over, sweep.capacity_high)
        return doc.Chip("Capacity", f"below {high} {UNITS[sweep.over]}, the lowest load", "error", "steps")
    if sweep.capacity is None:
        return doc.Chip("Capacity", "not known yet", "warning", "steps")
    value, note = capacity_texts(sweep)
    note = f" ({note})" if note else ""
    return doc.Chip("Capacity", f"{value} {UNITS[sweep.over]}{note}{rough}", level, "steps")


def _objectives_chip(sweeps: Sequence[SweepResult]) -> list[doc.Chip]:
    """Return a chip that states whether the sweeps met their objectives, as a list of one item.

    A chip is a part of the status strip at the top of the page. The list is empty if no sweep has objectives.
    """
    judged = [sweep for sweep in sweeps if sweep.objectives]
    if not judged:
        return []
    met = [sweep for sweep in judged if best_step(sweep) is not None]
    level: doc.Level = "ok" if len(met) == len(judged) else "error"
    if len(sweeps) > 1:
        return [doc.Chip("Objectives", f"met at some load in {len(met)} of {pluralise(len(judged), 'sweep')}", level)]
    (sweep,) = sweeps
    step = best_step(sweep)
    names = " and ".join(f"`{objective}`" for objective in sweep.objectives)
    if step is None:
        return [doc.Chip("Objectives", f"not met at any load: {names}", level)]
    word = "met" if step.verdict == "met" else "probably met"
    # The largest measured load is not named: next to the capacity, it would look like another result.
    return [doc.Chip("Objectives", f"{word} within the capacity: {names}", level)]


def _requests_chip(sweeps: Sequence[SweepResult]) -> list[doc.Chip]:
    """Return a list with one chip, which states how many of the planned requests were complete.

    Requests at loads above the capacity do not count, because failures are expected there. The list is empty if no
    requests were planned at the other loads.
    """
    steps = [step for sweep in sweeps for step in sweep.steps if _is_within(step, sweep)]
    planned = sum(step.planned for step in steps)
    if not planned:
        return []
    complete, rejected = sum(step.complete for step in steps), sum(step.rejected for step in steps)
    scope = "within the capacity" if any(sweep.state is not None for sweep in sweeps) else ""
    if complete == planned:
        return [doc.Chip("Requests", f"all {planned:,} complete {scope}".rstrip(), "ok", "steps")]
    mostly = ", mostly rejected" if rejected > (planned - complete) / 2 else ""
    text = f"{complete:,} of {planned:,} complete {scope}".rstrip()
    return [doc.Chip("Requests", f"{text}{mostly}", "error", "steps")]


def _is_within(step: SweepStep, sweep: SweepResult) -> bool:
    """Return True if the load of a step is probably within the capacity, or if the sweep has no capacity."""
    return sweep.state is None or (step.over <= 0.5 and step.verdict != "overload")


def best_cards(sweeps: Mapping[str, SweepResult], link: Links) -> list[Block]:
    """Return a block with cards that name the best sweeps, such as the sweep with the largest capacity.

    Further cards name the sweeps with the highest throughput, the lowest cost and the lowest energy. These figures are
    compared at the best step of each sweep.

    The keys of `sweeps` are the displayed names. `link` returns the link to the report of a step. The result is empty
    if there are fewer than two sweeps, or if their servers ran at different clock speeds.
    """
    if len(sweeps) < 2 or len({sweep.speed for sweep in sweeps.values()}) > 1:
        return []
    cards = _best_capacity(sweeps, link)
    throughput = throughput_field(sweeps.values())
    figures = [
        (f"Highest throughput{' per GPU' * (throughput == RATE)}", throughput, "tokens/s", max),
        ("Lowest energy", "joules_per_token", "J per token", min),
    ]
    if len({sweep.currency for sweep in sweeps.values()}) == 1:
        figures.insert(1, ("Lowest cost", "cost_per_million_tokens", "per million tokens", min))
    for label, field, unit, best in figures:
        steps = {name: step for name, sweep in sweeps.items() if (step := best_step(sweep)) is not None}
        values = {name: value for name, step in steps.items() if (value := getattr(step, field)) is not None}
        if len(values) > 1:
            name = best(values, key=lambda key: values[key])
            sweep, step = sweeps[name], steps[name]
            text = step_text(step, sweep, field)
            equal = [other for other in values if step_text(steps[other], sweeps[other], field) == text]
            load = (
                f"{'at' if sweep.over == 'rate' else 'with'} {format_load(sweep.over, step.load)} {UNITS[sweep.over]}"
            )
            note = f"{name}, {load}" if len(equal) == 1 else _names(equal)
            cards.append(Card(label, text, unit, note, link(sweep, step.folder)))
    return [Cards(cards)] if cards else []


def _best_capacity(sweeps: Mapping[str, SweepResult], link: Links) -> list[Card]:
    """Return the card with the largest capacity, or an empty list if the capacities cannot be compared."""
    known = {name: sweep for name, sweep in sweeps.items() if sweep.capacity is not None and sweep.state is not None}
    if len(known) < 2 or len({sweep.over for sweep in known.values()}) > 1:
        return []
    first, second = sorted(known, key=lambda name: known[name].capacity or 0, reverse=True)[:2]
    open_ended = [name for name, sweep in known.items() if sweep.capacity_high is None]
    sweep, rival = known[first], known[second]
    value, note = capacity_texts(sweep)
    overlaps = rival.capacity_high is None or rival.capacity_high > (sweep.capacity_low or 0)
    doubt = f"the interval overlaps that of {second}" if overlaps else ""
    step = best_step(sweep)
    report = "" if step is None else link(sweep, step.folder)
    remarks = "; ".join(filter(None, [note, doubt]))
    text = f"{first} ({remarks})" if remarks else first
    if len(open_ended) > 1 and first in open_ended:
        text = f"{_names(open_ended)} ({note})"
    return [Card("Largest capacity", value, UNITS[sweep.over], text, report)]


def _names(names: Sequence[str]) -> str:
    """Join one or two names of sweeps with `and`. For more names, return their number, such as `3 sweeps`."""
    return " and ".join(names) if len(names) <= 2 else f"{len(names)} sweeps"


def _frontier_section(sweeps: Mapping[str, SweepResult], per: str) -> Section:
    """Return the section with the frontier chart, and with controls that select what the charts of the page show."""
    several, results = len(sweeps) > 1, sweeps.values()
    caption = [
        f"{FRONTIER} {PER_USER}",
        STAR.format(cards="the table above describes" if several else "the figures above describe"),
    ]
    caption += [SEVERAL] if several else []
    caption += [BRACKET] if any(_is_bracket_drawn(sweep) for sweep in results) else []
    limited = any(step.limit_tokens_per_s_per_user for sweep in results for step in sweep.steps)
    caption += [f"{LIMIT}{' The check box shows it.' * several}"] if limited else []
    overloads = sum(step.verdict == "overload" for sweep in results for step in sweep.steps)
    caption += [OVERLOADS.format(pluralise(overloads, "run"))] if overloads else []
    switches = []
    if several:
        choices = [(str(index), name) for index, name in enumerate(sweeps)]
        switches.append(Switch("shown", "Show", choices, "checkbox"))
    if limited:
        # Limits are several times the measured figures. On a page of several sweeps they would squeeze the points.
        unchecked = ("limit",) if several else ()
        switches.append(Switch("limit", "", [("limit", "hardware limit")], "checkbox", unchecked))
    chart = ChartRef("frontier", f"Throughput{per} against speed per user", caption, "tall", "none")
    return Section("frontier", "Frontier", [chart], switches=switches)


def _is_bracket_drawn(sweep: SweepResult) -> bool:
    """Return True if the frontier chart shows the nearest measured loads below and above the capacity.

    Return False if there is no such pair of loads, or if one of the two loads overloaded the server. The chart does not
    show an overload, because a run that is ended early gives no valid throughput.
    """
    ends = _bracket(sweep)
    return ends is not None and all(step.verdict != "overload" for step in ends)


def _goodput_caption(results: Sequence[SweepResult]) -> list[str]:
    caption = [GOODPUT if any(sweep.objectives for sweep in results) else COMPLETE]
    caption += [BAND] if any(_capacity_data(sweep) for sweep in results) else []
    caption += [REQUESTED] if any(sweep.over == "rate" for sweep in results) else []
    return [*caption, PREDICTED] if any(sweep.predicted for sweep in results) else caption


def _cards(sweep: SweepResult, link: Links) -> list[Block]:
    """Return cards that show the capacity and the main figures at the largest load within the capacity."""
    step = best_step(sweep)
    if step is None:
        return []
    cards, report = list[Card](), link(sweep, step.folder)
    if sweep.capacity and sweep.state is not None:
        text, note = capacity_texts(sweep)
        cards.append(Card("Capacity", text, UNITS[sweep.over], note, report))
    at_load = f"{'at' if sweep.over == 'rate' else 'with'} {format_load(sweep.over, step.load)} {UNITS[sweep.over]}"
    largest = f"{at_load}, the largest measured load within the capacity" if sweep.state is not None else at_load
    price = f"{format_price(sweep.gpu_hour_cost, sweep.currency)} per {'GPU hour' if sweep.gpus else 'server hour'}"
    before, after = currency_parts(sweep.currency)
    figures = (
        (f"Throughput{' per GPU' * bool(sweep.gpus)}", getattr(step, throughput_field([sweep])), "tokens/s", largest),
        ("Speed per user", step.tokens_per_s_per_user, "tokens/s", f"1 / median TPOT, {at_load}"),
        ("Cost", step.cost_per_million_tokens, f"{after} per million tokens".strip(), f"{at_load}, {price}"),
        ("Energy", step.joules_per_token, "J per token", f"{at_load}, power {sweep.power}"),
    )
    for name, value, unit, note in figures:
        if value is not None:
            cards.append(Card(name, f"{before if name == 'Cost' else ''}{significant(value)}", unit, note, report))
    return [Cards(cards)]


def capacity_texts(sweep: SweepResult) -> tuple[str, str]:
    """Return the capacity as text, and a note on how certain it is.

    For a list of loads, the text names the two measured loads around the capacity, and the note states their verdicts.
    For a search, the text is the estimated capacity, and the note states its confidence interval.
    """
    low, high = format_load(sweep.over, sweep.capacity_low), format_load(sweep.over, sweep.capacity_high)
    ends = _bracket(sweep)
    if sweep.capacity_high is None:
        return f"at least {low}", "no load violated the objectives" if sweep.objectives else "no queue grew"
    if sweep.fixed_loads and ends is not None:
        below, above = map(_bracket_word, ends)
        between = f"{below} at {low} and {high}" if below == above else f"{below} at {low}, {above} at {high}"
        return interval_text(low, high), between
    return format_load(sweep.over, sweep.capacity), confidence_interval(low, high, level=sweep.confidence)


def throughput_title(*sweeps: SweepResult) -> str:
    """Return the title of the throughput column that compares these sweeps, such as `tokens/s per GPU`."""
    return "tokens/s per GPU" if throughput_field(sweeps) == RATE else "tokens/s"


def _steps(sweep: SweepResult, rate: str, link: Links) -> doc.Table:
    """Return the table of all steps of a sweep. `rate` is the name of the SweepStep field that holds the throughput."""
    rejected = ["rejected"] if any(step.rejected for step in sweep.steps) else []
    heads: dict[str, ColumnKind] = {
        {"rate": "requests/s sent", "concurrency": "requests at a time"}[sweep.over]: "head",
        _verdict_title(sweep): "text",
        **number_columns("P(over)", "complete", *rejected),
        **number_columns("requests/s", "goodput/s", f"tokens/s{' per GPU' * (rate == RATE)}"),
    }
    heads |= number_columns("tokens/s per user", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    extra = [
        (title, name)
        for title, name in (("cost per M", "cost_per_million_tokens"), ("J/token", "joules_per_token"))
        if any(getattr(step, name) is not None for step in sweep.steps)
    ]
    heads |= number_columns(*(title for title, _ in extra))
    rows = list[Cells]()
    for step in sweep.steps:
        report = link(sweep, step.folder)

        def cell(text: str, value: float | None = None, report: str = report) -> TableCell:
            return TableCell(text, value, link=report if text != UNKNOWN else "")

        rates = (step.requests_per_s, step.goodput_per_s, getattr(step, rate), step.tokens_per_s_per_user)
        times = (step.ttft_p50_s, step.ttft_p99_s, step.tpot_p50_s, step.tpot_p99_s)
        rows.append(
            (
                cell(format_load(sweep.over, step.load), step.load),
                _verdict(step, sweep) + ", knee" * (step.step == sweep.knee),
                cell(UNKNOWN if sweep.state is None else format_chance(step.over), step.over),
                cell(percent(step.complete / step.planned) if step.planned else UNKNOWN),
                *(cell(percent(step.rejected / (step.planned or 1)), step.rejected) for _ in rejected),
                *(cell(significant(value), value) for value in rates),
                *(cell(duration(time), time) for time in times),
                *(cell(step_text(step, sweep, name), getattr(step, name)) for _, name in extra),
            )
        )
    return table("Steps, by load", heads, rows, several=True, id="steps-table")


def step_text(step: SweepStep, sweep: SweepResult, name: str) -> str:
    """Return a figure of a step as text. `name` is the field of SweepStep. A cost is shown with its currency."""
    value = getattr(step, name)
    return format_price(value, sweep.currency) if name == "cost_per_million_tokens" else significant(value)


def _comparison(sweeps: Mapping[str, SweepResult], link: Links) -> doc.Table:
    """Return a table that compares sweeps, each at the largest load that met its objectives."""
    rate = throughput_field(sweeps.values())
    heads: dict[str, ColumnKind] = {
        "server": "head",
        **number_columns("capacity", "at", throughput_title(*sweeps.values()), "tokens/s per user"),
    }
    heads |= number_columns("cost per M tokens", "J per token")
    rows = list[Cells]()
    for index, sweep in enumerate(sweeps.values()):
        step = best_step(sweep)
        report = "" if step is None else link(sweep, step.folder)
        values = [None if step is None else getattr(step, name) for name in (rate, *COMPARED)]
        first = TableCell(UNKNOWN)
        if sweep.capacity is not None:
            text, note = capacity_texts(sweep)
            note = "; ".join(filter(None, [note, "" if _is_settled(sweep) else "less exact than requested"]))
            first = TableCell(f"{text} {UNITS[sweep.over]}", sweep.capacity, note, link=report)
        load = UNKNOWN if step is None else format_load(sweep.over, step.load)
        texts = [significant(value) for value in values]
        if step is not None:
            texts[2] = format_price(step.cost_per_million_tokens, sweep.currency)
        cells = [
            TableCell(text, value, link=report if value else "") for text, value in zip(texts, values, strict=True)
        ]
        rows.append((TableCell("", run=index), first, TableCell(load, link=report), *cells))
    sources = [f"Prices: {prices}."] if (prices := _prices(sweeps.values())) else []
    sources += [f"Energy: power {power}." for power in dict.fromkeys(sweep.power for sweep in sweeps.values()) if power]
    objectives = {tuple(sweep.objectives) for sweep in sweeps.values()}
    met = " and ".join(objectives.pop()) if len(objectives) == 1 else "the objectives"
    title = f"At the largest load within the capacity{f' ({met})' if met else ''}"
    return table(title, heads, rows, several=True, id="ranking", notes=[" ".join(sources)] if sources else [])


def _prices(sweeps: Iterable[SweepResult]) -> str:
    """Return the different prices of the sweeps as text, such as `$2.5 per GPU hour`. The text is empty if no price is
    known.
    """
    texts = (
        f"{format_price(sweep.gpu_hour_cost, sweep.currency)} per {'GPU hour' if sweep.gpus else 'server hour'}"
        for sweep in sweeps
        if sweep.gpu_hour_cost is not None
    )
    return ", ".join(dict.fromkeys(texts))


def _chart_data(sweeps: Mapping[str, SweepResult], link: Links) -> list[dict[str, Any]]:
    """Return the input of frontier.js: one object for each sweep.

    The object contains the name and the colour of the sweep, its steps, its capacity and its predicted points. `link`
    returns the link to the report of a step.
    """
    rate, runs = throughput_field(sweeps.values()), []
    for index, ((name, sweep), colour) in enumerate(zip(sweeps.items(), cycle(PALETTE))):
        gpus = 1 if rate == RATE else sweep.gpus or 1
        best, ends = best_step(sweep), _bracket(sweep)
        runs.append(
            {
                "name": name,
                "colour": colour,
                "dash": DASHES[index // len(PALETTE) % len(DASHES)],
                "over": sweep.over,
                "judged": bool(sweep.objectives),
                "capacity": _capacity_data(sweep),
                "bracket": [] if ends is None else [end.step for end in ends],
                "steps": [
                    {
                        "step": step.step,
                        "load": step.load,
                        "label": format_load(sweep.over, step.load),
                        "verdict": _bracket_word(step),
                        "overload": step.verdict == "overload",
                        "best": best is not None and step.step == best.step,
                        "speed": step.tokens_per_s_per_user,
                        "ttft": step.ttft_p50_s,
                        "rate": getattr(step, rate),
                        "goodput": step.requests_per_s if step.goodput_per_s is None else step.goodput_per_s,
                        "limit_speed": step.limit_tokens_per_s_per_user,
                        "limit_rate": (step.limit_tokens_per_s_per_gpu or 0) * gpus or None,
                        "hover": _hover_lines(step, sweep, rate),
                        "report": link(sweep, step.folder),
                    }
                    for step in sweep.steps
                ],
                "predicted": [
                    {
                        "load": point["load"],
                        "speed": point.get("tokens_per_s_per_user"),
                        "ttft": point.get("ttft_p50_s"),
                        "rate": point.get(rate),
                        "goodput": point.get("requests_per_s"),
                    }
                    for point in sweep.predicted
                ],
            }
        )
    return runs


def _capacity_data(sweep: SweepResult) -> dict[str, Any] | None:
    """Return the capacity and its interval for the chart of goodput by load, or None if the capacity is unknown."""
    low, high = sweep.capacity_low, sweep.capacity_high
    if sweep.state is None or sweep.capacity is None or low is None or high is None:
        return None
    return {"at": None if sweep.fixed_loads else sweep.capacity, "low": low, "high": high}


def _hover_lines(step: SweepStep, sweep: SweepResult, rate: str) -> list[str]:
    """Return the lines of the tooltip of a step (the run at one load): its load, verdict and main figures.

    `rate` is the name of the SweepStep field with the throughput.
    """
    verdict = _verdict(step, sweep)
    per_gpu = " per GPU" if rate == RATE else ""
    lines = [f"{format_load(sweep.over, step.load)} {UNITS[sweep.over]}{f': {verdict}' if verdict else ''}"]
    lines.append(f"{significant(getattr(step, rate))} tokens/s{per_gpu}")
    lines.append(f"{significant(step.tokens_per_s_per_user)} tokens/s per user")
    lines.append(f"TTFT p50 {duration(step.ttft_p50_s)}, p99 {duration(step.ttft_p99_s)}")
    if step.goodput_per_s is not None:
        lines.append(f"{significant(step.goodput_per_s)} good requests/s")
    if step.cost_per_million_tokens is not None:
        lines.append(f"{format_price(step.cost_per_million_tokens, sweep.currency)} per million tokens")
    if step.joules_per_token is not None:
        lines.append(f"{significant(step.joules_per_token)} J per token")
    return lines
