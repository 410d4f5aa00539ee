"""Formats the result of `loadgen plan-capacity` for the terminal, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadgen.analysis.format import UNKNOWN, duration, pluralise, significant
from loadgen.analysis.hardware import align_columns
from loadgen.analysis.objectives import Objective
from loadgen.analysis.prices import currency_parts
from loadgen.plan import Plan
from loadgen.servers.hardware import constant
from loadgen.servers.hardware.validation import describe
from loadgen.studies.capacity import CapacityOption
from loadgen.studies.capacity_search import (
    COSTS_MORE,
    NO_PRICE,
    PLURALS,
    WITH_INTERVAL,
    WORKERS_WITH_INTERVAL,
    SearchResult,
)
from loadgen.studies.configurations import ENGINES, SearchSpace
from loadgen.studies.price_list import AVAILABILITY

LINE_WIDTH = 80
MAX_OPTIONS = 12
"""Maximum number of options in the terminal."""
MAX_REASONS = 6
"""Maximum number of reasons that are printed. The others are counted."""

MAX_NAMES = 2
"""Maximum number of configurations that are named for one reason."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The result of a search of `loadgen plan-capacity`, and the load, objectives and configurations of the search."""

    result: SearchResult
    plan: Plan
    model: str
    objectives: Sequence[Objective]
    space: SearchSpace

    @property
    def options(self) -> list[CapacityOption]:
        """The options that meet the objectives, cheapest first."""
        return [option for option in self.result.options if option.gpus]

    @property
    def goals(self) -> str:
        """The objectives, separated by commas."""
        return ", ".join(objective.text for objective in self.objectives)

    @property
    def load(self) -> str:
        """A description of the load."""
        plan = self.plan
        rate = f"{self.result.rate_per_s:g} {self.arrivals}/s"
        return f"{rate} of {plan.input_tokens} + {plan.output_tokens} tokens ({plan.workload})"

    @property
    def arrivals(self) -> str:
        """The unit of arrivals: `sessions` if the workload consists of sessions, otherwise `requests`."""
        return "sessions" if self.plan.uses_sessions else "requests"

    @property
    def assumptions(self) -> str:
        """The assumptions that the user set, such as `Assumed: cache hit rate 0.8`, or "" if there are none."""
        texts = [f"{name.replace('_', ' ')} {value}" for name, value in self.space.assumptions.items()]
        return f"Assumed: {', '.join(texts)}" if texts else ""

    @property
    def engines(self) -> str:
        """The engines of the search, separated by commas."""
        return ", ".join(self.space.engines)

    def name(self, option: CapacityOption) -> str:
        """Return the name of an option, which is its GPU type.

        If the search covers several number formats, the format is added. If it covers several engines, the engine is
        added.
        """
        parts = [option.gpu]
        parts += [option.format] if len(self.space.formats) > 1 else []
        parts += [option.engine] if len(self.space.engines) > 1 else []
        return " ".join(parts)

    def full_name(self, option: CapacityOption) -> str:
        """Return the name and the layout of an option, such as `H100 SXM fp8 TP2`."""
        return f"{self.name(option)} {option.layout}"

    def text(self) -> str:
        """Return the whole report."""
        result = self.result
        title = f"SIMULATED (virtual)  {self.model} on {self.engines}: {self.goals}"
        lines = [textwrap.fill(title, LINE_WIDTH, subsequent_indent="  ", fix_sentence_endings=False), self.load]
        lines += [_filled(self.assumptions), ""] if self.assumptions else [""]
        options = self.options
        if options:
            lines += [_fitted(self._option_rows), ""]
            if len(options) > MAX_OPTIONS:
                lines += [f"{len(options) - MAX_OPTIONS} more: --json", ""]
        reasons = self.reasons()
        if reasons:
            lines += ["Not possible:", *_listed(reasons), ""]
        if result.pareto:
            lines += ["Pareto set: speed per user against cost, if the load is always this high"]
            lines += [_fitted(self._pareto_rows), ""]
        if options:
            lines += ["The first option, to copy:", *_command_lines(options[0].commands)]
            lines += [_filled(" ".join(options[0].notes)), ""]
        lines += [_filled(text) for text in self.notes()]
        return "\n".join(lines)

    def _option_rows(self, level: int) -> list[tuple[str, ...]]:
        """Return the heading and the rows of the table of options.

        `level` is from 0 to 3. With a higher level, the rows are narrower: they have fewer columns or shorter texts.
        """
        priced = any(option.cost_per_hour is not None for option in self.options)
        names = ("type", "layout") if level < 2 else ("configuration",)
        rates = () if level >= 2 else (f"{self.arrivals}/s each",)
        costs: tuple[str, ...] = ("per hour", "per 1M tokens" if level < 1 else "per 1M")
        if not priced:
            costs = ()
        elif level >= 3:
            costs = costs[:1]
        rows: list[tuple[str, ...]] = [("GPUs", *names, *rates, *costs)]
        for option in self.options[:MAX_OPTIONS]:
            paid = (format_cost(option.cost_per_hour, option), format_cost(option.cost_per_million_tokens, option))
            name = (self.name(option), option.layout) if level < 2 else (self.full_name(option),)
            rate = () if level >= 2 else (rate_text(option, brief=level > 0),)
            rows.append((gpus_text(option), *name, *rate, *paid[: len(costs)]))
        return rows

    def _pareto_rows(self, level: int) -> list[tuple[str, ...]]:
        """Return the heading and the rows of the table of the Pareto set.

        `level` is from 0 to 3. With a higher level, the rows are narrower: they have fewer columns or shorter texts.
        """
        points = self.result.pareto
        priced = any(point.cost_per_million_tokens is not None for point in points)
        speed = ("tokens/s user", "tok/s user", "tok/s user", "tok/s")[level]
        rows: list[tuple[str, ...]] = []
        for point in points:
            columns = {
                "configuration": self.full_name(point.option),
                "GPUs": f"{point.option.gpus}",
                speed: significant(point.tokens_per_s_per_user),
                "per GPU": significant(point.tokens_per_s_per_gpu),
                "per 1M": format_cost(point.cost_per_million_tokens, point.option),
                "TTFT p99": duration(point.ttft_p99_s),
                "objectives" if level < 1 else "met": "met" if point.meets else "missed",
            }
            if level >= 1:
                columns["met"] = "yes" if point.meets else "no"
            if level >= 3:
                del columns["GPUs"]
            if not priced:
                del columns["per 1M"]
            if level >= 2 and priced:
                del columns["per GPU"]
            rows += [] if rows else [tuple(columns)]
            rows.append(tuple(columns.values()))
        return rows

    def reasons(self) -> list[str]:
        """Return one line for each reason why configurations cannot serve the load. The line names these
        configurations.

        Configurations that were left out of the simulation because of a high or unknown price are not listed.
        """
        names: dict[str, list[str]] = {}
        for option in (*self.result.options, *self.result.not_simulated):
            if not option.gpus and option.not_possible not in (COSTS_MORE, NO_PRICE):
                names.setdefault(self._reason(option), []).append(self.full_name(option))
        return [f"{_some(several)}: {reason}" for reason, several in names.items()]

    def _reason(self, option: CapacityOption) -> str:
        if not option.figures or not option.not_possible.startswith("a single request"):
            return option.not_possible
        latencies = [
            f"{objective.figure}.{objective.statistic} {UNKNOWN if figure is None else duration(figure)}"
            for objective, figure in zip(self.objectives, option.figures, strict=True)
        ]
        return f"a single request has {', '.join(latencies)}"

    def search_text(self) -> str:
        """Return a sentence about how many configurations were considered, pruned and simulated."""
        counts = self.result.search
        pruned = "; ".join(_counted(number, reason) for reason, number in counts.pruned.items())
        text = f"Searched {pluralise(counts.considered, 'configuration')} in {counts.seconds:.1f} s"
        text += f": {pruned or 'none excluded'}; {counts.simulated:,} simulated in {counts.simulations:,} runs."
        if not counts.impossible:
            return text
        impossible = pluralise(sum(counts.impossible.values()), "further combination")
        reasons = "; ".join(f"{reason} ({number:,})" for reason, number in counts.impossible.items())
        return f"{text} {impossible} cannot run: {reasons}."

    def notes(self) -> list[str]:
        """Return paragraphs about the search, the assumptions and the accuracy."""
        share = 100 * constant("step_error")
        priced = any(option.cost_per_hour is not None for option in self.options)
        costs = "Costs are per hour, and per million output tokens at this rate. " if priced else ""
        cached = self.space.cache_hit_rate
        cache = (
            f"which find {100 * cached:g}% of the prompt tokens in their caches" if cached else "without a shared cache"
        )
        texts = [
            self.search_text(),
            f"{costs}The figures assume Poisson arrivals, spread evenly over replicas {cache}, and no "
            f"spare capacity for failures or peaks. Ranges in parentheses: steps take {share:.0f}% more or less time "
            "than modelled. Nine of ten published measurements are within that range.",
        ]
        if any(not has_interval(option) for option in self.options):
            texts.append(
                f"(?): no range was computed. Only the {WITH_INTERVAL} cheapest options have one, and of those with "
                f"separate workers the {WORKERS_WITH_INTERVAL} cheapest."
            )
        unpriced = dict.fromkeys(option.gpu for option in self.options if option.cost_per_hour is None)
        if priced and unpriced:
            texts.append(f"No price is known of {', '.join(unpriced)}.")
        shown = [*self.options[:MAX_OPTIONS], *(point.option for point in self.result.pareto)]
        texts += _price_notes(shown)
        if any(option.spot for option in shown):
            texts.append(
                f"* Spot price. Costs of options include spare replicas, so that enough replicas work for "
                f"{AVAILABILITY:.0%} of the time at the interruption rate of the price list. Costs of the Pareto set "
                "include the time in which machines are down, but no spare replicas. Requests on an interrupted "
                "replica fail."
            )
        if any(option.prefill_workers is not None for option in self.options):
            texts.append("Separate workers send each KV cache over InfiniBand, 200 Gbit/s per GPU.")
        if any(self.space.drafts):
            texts.append("Speculation needs a draft model; the acceptance is an assumption (--acceptance).")
        return texts + accuracy_lines(shown)


def _counted(number: int, reason: str) -> str:
    """Return a number of configurations and the reason why they were excluded, such as `3 miss an objective`."""
    return f"{number:,} {reason if number == 1 else PLURALS.get(reason, reason)}"


def _some(names: Sequence[str]) -> str:
    """Return the names, or their number if there are many."""
    return ", ".join(names) if len(names) <= MAX_NAMES else pluralise(len(names), "configuration")


def _price_notes(options: Iterable[CapacityOption]) -> list[str]:
    """Return a list with one sentence that names the region of each GPU type's price.

    The list is empty if no price has a region.
    """
    prices = {
        f"{option.gpu} {'spot' if option.spot else 'on demand'} in {option.region}": None
        for option in options
        if option.cost_per_hour is not None and option.region
    }
    return [f"Prices: {', '.join(prices)}."] if prices else []


def accuracy_lines(options: Iterable[CapacityOption]) -> list[str]:
    """Return sentences that state how accurate the predictions for `options` are.

    Options whose predictions have the same accuracy share a sentence. It names their engines, serving modes and GPU
    types.
    """
    by_text: dict[str, dict[str, list[str]]] = {}
    for option in options:
        mode = " with speculation" if option.draft_tokens else ""
        mode = " with pipelines" if option.pipeline_parallel > 1 else mode
        mode = " in separate workers" if option.prefill_workers is not None else mode
        modes = by_text.setdefault(describe(option.accuracy), {})
        gpus = modes.setdefault(f"{ENGINES[option.engine].title}{mode}", [])
        if option.gpu not in gpus:
            gpus.append(option.gpu)
    lines = []
    for text, modes in by_text.items():
        names = "; ".join(f"{name} on {', '.join(gpus)}" for name, gpus in modes.items())
        lines.append(f"Accuracy of the model for {names}: {text}.")
    return lines


def has_interval(option: CapacityOption) -> bool:
    """Return True if `option` has an interval of uncertainty for its number of GPUs: from `gpus_low` to `gpus_high`.

    These numbers are computed only for the cheapest options.
    """
    return option.gpus_low is not None


def gpus_text(option: CapacityOption) -> str:
    """Return the number of GPUs with its interval and spare GPUs, such as `7 (5-10)` or `8+2 (6-12)`.

    If the interval was not computed, `(?)` takes its place.
    """
    number = f"{option.gpus}" + (f"+{option.spare_gpus}" if option.spare_gpus else "")
    if not has_interval(option):
        return f"{number} (?)"
    if option.gpus_low is None or option.gpus_low == option.gpus_high:
        return number
    return f"{number} ({option.gpus_low}-{option.gpus_high or '∞'})"


def rate_text(option: CapacityOption, *, brief: bool = False) -> str:
    """Return the requests per second of one replica with the interval of this rate, such as `5.2 (4.8-5.6)`.

    The interval is left out if `brief` is True, or if it was not computed. For separate prefill and decode workers, the
    result is `-`.
    """
    if option.prefill_workers is not None:
        return "-"
    text = significant(option.replica_per_s or 0)
    if brief or option.replica_per_s_low is None:
        return text
    return f"{text} ({significant(option.replica_per_s_low)}-{significant(option.replica_per_s_high or 0)})"


def format_cost(cost: float | None, option: CapacityOption) -> str:
    """Return `cost` as a text with the currency of `option`, or `-` if the cost is None.

    An asterisk after the number means that the cost is a spot price.
    """
    if cost is None:
        return "-"
    before, after = currency_parts(option.currency)
    mark = "*" if option.spot else ""
    return f"{before}{cost:,.2f}{after}{mark}"


def _fitted(rows: Callable[[int], list[tuple[str, ...]]]) -> str:
    """Return a table as text, in the widest form that fits into LINE_WIDTH columns.

    `rows` takes a level from 0 to 3 and returns the rows of the table. Level 0 gives the widest table, and level 3 the
    narrowest one. If no form fits, the narrowest one is returned.
    """
    tables = (align_columns(rows(level)) for level in range(4))
    table = ""
    for table in tables:
        if max(map(len, table.splitlines())) <= LINE_WIDTH:
            break
    return table


def _listed(reasons: Sequence[str]) -> list[str]:
    """Return the first MAX_REASONS reasons as indented lines. If there are more, the last line states how many."""
    lines = []
    for reason in reasons[:MAX_REASONS]:
        lines += textwrap.wrap(reason, LINE_WIDTH - 2, initial_indent="  ", subsequent_indent="    ")
    if len(reasons) > MAX_REASONS:
        lines.append(f"  {len(reasons) - MAX_REASONS} more: --json")
    return lines


def _command_lines(commands: dict[str, str]) -> list[str]:
    """Return command lines for display. Long lines are wrapped with backslashes, so that a shell still accepts them."""
    lines = []
    for command in commands.values():
        words = command.split(" --")
        wrapped = [words[0]]
        for word in words[1:]:
            if len(wrapped[-1]) + len(word) + 5 > LINE_WIDTH - 2:
                wrapped.append("")
            wrapped[-1] += f" --{word}" if wrapped[-1] else f"    --{word}"
        for index, line in enumerate(wrapped):
            lines.append(f"  {line} \\" if index < len(wrapped) - 1 else f"  {line}")
    return lines


def _filled(text: str) -> str:
    return textwrap.fill(text, LINE_WIDTH, break_on_hyphens=False)
