"""What is to be known before a figure is used: each thing once, as a sentence with its level, for every renderer.

`findings` is the list; `verdict` is its sum. A finding is `ok` (checked and fine), a `note`, a `warning` (the figure
stands, with care) or an `error` (something failed, or the figures are not those of the server).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loadgen.analysis.client_health import RING_OFF
from loadgen.analysis.format import byte_size, duration, percent, pluralise, significant, times_speed
from loadgen.analysis.hardware_limit import HardwareLimit
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import BoundsMet, ObjectiveVerdict
from loadgen.analysis.report import Finding, Level
from loadgen.analysis.summary import (
    ClientHealth,
    LengthDifference,
    MemoryLevels,
    OutsideWindow,
    RequestCounts,
    ServerInfo,
    Summary,
)

COUNTED = {
    **{"prompt_tokens": "prompt tokens", "output_tokens": "output tokens"},
    **{"requests_finished": "finished requests", "rejections": "rejections"},
}
"""Counters that server and client both have."""
UNLIKELY = 0.001
"""A p-value below which a load is said to be another than its target: one such run in a thousand is chance."""
GPUS_NAMED = 4
ERROR_MOST = 0.05
"""Of its median: a worst-case error beyond that is a warning."""


def findings(summary: Summary) -> list[Finding]:
    """All there is to know of one run, what matters most first."""
    requests, tokens, client = summary.requests, summary.tokens, summary.client
    doubtful = tokens.prompt_mismatches or tokens.output_mismatches or tokens.prompt_unreported or _chunks(summary)
    exact: Level = "warning" if doubtful or not requests.complete else "note" if summary.run.may_end else "ok"
    result = [
        Finding("client", client_level(client), client_sentence(summary), "client"),
        *_error_bars(client, summary),
        *filter(None, [priority(client)]),
        Finding("complete", _endings_level(requests), outcome_sentence(summary), "failures"),
        Finding("lengths", exact, lengths_sentence(summary), "lengths"),
        *streaming_findings(summary),
    ]
    if beyond := summary.run.over_limit:
        result.append(Finding("over_limit", "note", f"Sent on purpose (--over-limit): {beyond}.", "failures"))
    if known := addresses_sentence(summary.server):
        result.append(Finding("addresses", "note", known, "failures"))
    if sent := delivery_sentence(summary):
        result.append(Finding("delivery", "ok" if delivered_as_requested(summary) else "warning", sent, "sending"))
    if summary.machines:
        each = ", ".join(f"{machine.name} ±{duration(machine.uncertainty_s)}" for machine in summary.machines)
        result.append(
            Finding("machines", "ok", f"{pluralise(len(summary.machines), 'machine')}, clocks known to: {each}.")
        )
    result += [
        *(Finding("goodput", "note", text, "goodput") for text in goodput_sentences(summary)),
        *_counters(summary),
    ]
    result += _window(summary)
    if contradiction := littles_law_sentence(summary):
        result.append(Finding("littles_law", "warning", contradiction, "course"))
    result += [Finding("memory", "note", text, "machines") for text in memory_sentences(summary)]
    if summary.limit:
        result.append(
            Finding(
                "limit", "warning" if summary.limit.exceeds_limit else "note", hardware_limit_sentence(summary.limit)
            )
        )
    return [*result, *_warnings(summary)]


def verdict(summary: Summary, found: Sequence[Finding]) -> Finding:
    """Whether the figures are valid, in a sentence."""
    if not summary.requests.complete:
        why = f", and {_blame(summary.client)}" if summary.client.client_limit else ""
        return Finding("invalid", "error", f"Invalid: no request was complete{why}.")
    if window_is_empty(summary):
        return Finding("invalid", "error", "Invalid: no complete request was due in the window.")
    if not summary.client.ok:
        return Finding("invalid", "error", f"Invalid: {_blame(summary.client)}.")
    if doubts := sum(each.level in ("warning", "error") for each in found):
        return Finding("warning", "warning", f"Valid, with {pluralise(doubts, 'warning')} below.")
    return Finding("valid", "ok", "Valid: every check passed.")


def stopped_count(summary: Summary) -> int:
    """Those of the failed that ended because the run, or their user on the interactive page, was stopped."""
    return summary.requests.errors.get("cancelled", 0)


def _endings_level(requests: RequestCounts) -> Level:
    """Return the level of the sentence on how requests ended: a warning where rejections are all that is missing."""
    if not requests.planned:
        return "error"
    if requests.all_complete:
        return "ok"
    return "warning" if requests.complete + requests.rejected == requests.planned else "error"


def outcome_sentence(summary: Summary) -> str:
    """Return a sentence on how the requests ended."""
    requests = summary.requests
    if not requests.planned:
        return "Nothing was sent."
    never = requests.errors.get("session_ended", 0)
    ended = f"never sent, as {'its' if never == 1 else 'their'} session had ended"
    counts = {"failed": requests.failed - stopped_count(summary), "rejected": requests.rejected}
    counts |= {"truncated": requests.truncated}
    counts |= {"dropped": requests.dropped - never, ended: never, "without a record": requests.unrecorded}
    counts |= {"stopped with the run": stopped_count(summary)}
    parts = [f"{number:,} {state}" for state, number in counts.items() if number]
    if not parts:
        return f"All {requests.planned:,} requests complete."
    return f"{requests.complete:,} of {requests.planned:,} requests complete; {', '.join(parts)}."


def addresses_sentence(server: ServerInfo) -> str:
    """Return a sentence on the addresses of the server's name, where it has several; else nothing."""
    if len(server.addresses) < 2 and not server.addresses_unused:
        return ""
    turns = "in turn to" if len(server.addresses) > 1 else "to"
    unused = [f"{address} was not used ({reason})" for address, reason in server.addresses_unused.items()]
    return "; ".join([f"Connections went {turns} {', '.join(server.addresses)}", *unused]) + "."


def lengths_sentence(summary: Summary) -> str:
    """Return a sentence on whether prompts and outputs had the requested lengths, by the server's own count."""
    tokens, complete = summary.tokens, summary.requests.complete
    if complete == 0:
        return "Lengths unchecked: no request was complete."
    prompt = "all prompt lengths as requested"
    if tokens.prompt_mismatches:
        prompt = f"{tokens.prompt_mismatches:,} of {pluralise(complete, 'prompt length')} not as requested"
    if tokens.prompt_unreported:
        prompt = f"prompt length not reported for {pluralise(tokens.prompt_unreported, 'request')}"
    elif tokens.prompt_unknown == complete:
        prompt = "prompt lengths not known beforehand"
    elif later := tokens.prompt_unknown:
        held_more = "earlier outputs" if summary.run.load.sessions else "more than their text"
        prompt += f" ({later:,} of unknown length, as they held {held_more})"
    sentence = f"{prompt[0].upper()}{prompt[1:]}"
    return f"{sentence}; {_output_lengths(summary)}." if summary.generates else f"{sentence}."


def _output_lengths(summary: Summary) -> str:
    """Return a clause on how many responses ended early or were longer than requested, by how much, and why."""
    tokens, complete = summary.tokens, summary.requests.complete
    if chunks := _chunks(summary):
        return f"output lengths unknown for {pluralise(chunks, 'request')}, as only chunks were counted"
    early, longer = tokens.output_early, tokens.output_longer
    parts = []
    if early:
        subject = f"{early.responses:,} of {pluralise(complete, 'response')}"
        parts.append(f"{subject} ended early, after {_mean_tokens(early, 'of')}")
    if longer:
        subject = f"{longer.responses:,}" if early else f"{longer.responses:,} of {pluralise(complete, 'response')}"
        verb = "was" if longer.responses == 1 else "were"
        parts.append(f"{subject} {verb} longer than requested: {_mean_tokens(longer, 'tokens instead of')}")
    if not parts and tokens.output_mismatches:  # a summary of an older version says no more
        parts.append(f"{tokens.output_mismatches:,} of {pluralise(complete, 'output length')} not as requested")
    clauses = [", and ".join(parts) or "all output lengths as requested"]
    clauses += dict.fromkeys(each.why for each in (early, longer) if each and each.why)
    if summary.run.may_end:
        clauses.append("responses were allowed to end early, so runs are not strictly comparable")
    return "; ".join(clauses)


def _mean_tokens(difference: LengthDifference, between: str) -> str:
    """Return the mean length of these responses and the mean length requested: `50 of 128 tokens on average`."""
    means = (difference.tokens_mean, difference.requested_mean)
    mean, requested = (f"{value:,.1f}".removesuffix(".0") for value in means)
    unit = " tokens" if between == "of" else ""
    average = " on average" if difference.responses > 1 else ""
    return f"{mean} {between} {requested}{unit}{average}"


def streaming_findings(summary: Summary) -> list[Finding]:
    """Return findings about tokens that were not streamed, or whose chunk is not known."""
    tokens, complete = summary.tokens, summary.requests.complete
    by, result = tokens.streamed_by, list[Finding]()
    if contradicted := by.get("contradicted", 0):
        text = (
            f"Token counts contradict each other in {contradicted:,} of {pluralise(complete, 'response')}: "
            f"their chunks hold {tokens.contradicted_chunks:,} tokens, and the server's totals are "
            f"{tokens.contradicted_totals:,}. "
            "Figures use the totals, spread evenly over the chunks; where a total is 0, they use the chunks."
        )
        result.append(Finding("tokens-contradicted", "warning", text, "lengths"))
    if tokens.unstreamed:
        text = (
            f"{tokens.unstreamed:,} generated tokens were never streamed, in {tokens.unstreamed_requests:,} of "
            f"{pluralise(complete, 'response')} (hidden reasoning, for example). TPOT and ITL are of the streamed "
            "tokens; lengths and throughput are of all tokens."
        )
        assumed = by.get("assumed_hidden", 0)
        if assumed:
            text += f" For {pluralise(assumed, 'response')} this is assumed from text and timing."
        result.append(Finding("tokens-hidden", "warning" if assumed else "note", text, "lengths"))
    if spread := by.get("spread", 0):
        text = (
            f"The server does not say how many tokens the chunks of {spread:,} of {pluralise(complete, 'response')} "
            f"hold: {significant(tokens.spread_per_chunk or 0.0)} on average. TPOT and ITL assume that "
            "tokens are spread evenly over the chunks."
        )
        result.append(Finding("tokens-spread", "note", text, "lengths"))
    return result


def _chunks(summary: Summary) -> int:
    """Complete requests of whose answers nobody knows more than in how many chunks they came."""
    return summary.tokens.counted_by.get("chunks", 0)


def client_sentence(summary: Summary) -> str:
    """Say whether the load generator was the bottleneck, and how exact its timestamps are."""
    client = summary.client
    word = "Valid: the load generator was not a bottleneck" if client.ok else f"Invalid: {_blame(client)}"
    own = client.error_bar_e2e_s
    bar = f"error ±{duration(own, 2)}" if own is not None else "error unknown"
    said = f"{word}; {client.source.title}, {bar}"
    requests = pluralise(summary.requests.sent, "request")
    if client.ring_rejected:
        said += f"; packet timestamps and socket timestamps disagreed in {client.ring_rejected:,} of {requests}"
        said += ": socket timestamps used" + ("" if client.ring_given_up else " for those")
    if client.socket_rejected:
        said += f"; kernel timestamps contradicted {client.socket_rejected:,} of {requests}"
        said += ": user-space timestamps used for those"
    if client.ring_drops:
        said += f"; the packet ring lost {pluralise(client.ring_drops, 'segment')}"
    if client.ring_missed:
        said += (
            f"; {pluralise(client.ring_missed, 'instant')} missing in the packet ring: socket timestamps used for those"
        )
    if client.lacking:
        said += f"; {client.lacking}"
    if result := client.calibration:
        rate = f", {result.events_per_s:,.0f} events/s" if result.events_per_s else ""
        said += f"; calibrated {result.made_at[:10]}: TTFT ±{duration(result.ttft_p99_s, 2)} at p99{rate}"
    return f"{said}."


def client_level(client: ClientHealth) -> Level:
    """Return the level of `client_sentence`: a warning where the run has other timestamps than it was meant to have."""
    return "error" if not client.ok else "warning" if client.ring_given_up or client.socket_rejected else "ok"


def priority(client: ClientHealth) -> Finding | None:
    """Say at which scheduling priority the client ran, where it is not the usual one or was refused on request.

    A refusal of the default is no fault of a run that was fast enough: the reasons name it where it was not.
    """
    facts = client.scheduling
    if facts is None:
        return None
    nice = f"nice {facts.nice}" if facts.nice < 0 else "normal priority"
    if client.realtime_given_up:
        text = (
            f"{pluralise(client.realtime_given_up, 'worker')} gave up real-time priority after 200 ms on a core "
            f"without a pause, and went on at {nice}."
        )
        return Finding("priority", "warning", text, "client")
    if facts.policy == "realtime":
        return Finding("priority", "note", "The client ran at real-time priority.", "client")
    if facts.requested == "realtime":
        text = (
            f"The client ran at {nice}: real-time priority is not permitted ({facts.refused}). Run it as root, grant "
            "CAP_SYS_NICE, or raise `ulimit -r`."
        )
        return Finding("priority", "warning", text, "client")
    if facts.nice < 0:
        return Finding("priority", "note", f"The client ran at {nice}.", "client")
    return None


def _blame(client: ClientHealth) -> str:
    """Say what makes the figures doubtful: the client, or its timestamps alone, as in runs of older versions."""
    if client.reasons and all(reason.startswith(RING_OFF) for reason in client.reasons):
        return "packet timestamps and socket timestamps disagree"
    if client.client_limit:
        return "this machine could not send every request"
    return "possible client bottleneck"


def _error_bars(client: ClientHealth, summary: Summary) -> list[Finding]:
    """Of TTFT, TPOT and ITL where tokens that shared a read make them less certain; nothing where none does."""
    alone_s = client.error_bar_e2e_s
    if alone_s is None or ((client.error_bar_ttft_s or 0) <= alone_s and (client.error_bar_itl_s or 0) <= 2 * alone_s):
        return []
    bars = {name: getattr(client, f"error_bar_{name}") for name in ("ttft_s", "tpot_s", "itl_s")}
    middles = {name: summary.latencies[name].p50 for name in bars}
    known = {name: bar for name, bar in bars.items() if bar is not None}
    wide = [name for name, bar in known.items() if (middle := middles[name]) and bar > ERROR_MOST * middle]
    said = [f"{METRICS[name].short} ±{duration(bar, 2)}" for name, bar in known.items()]
    parts = (f"{METRICS[name].short} uncertain by {percent(known[name] / (middles[name] or 1))}" for name in wide)
    more = f"{', '.join(parts)} of the median (limit {ERROR_MOST:.0%})".replace("%)", " %)")
    text = f"Worst-case error from coalesced reads: {', '.join(said)}"
    text += f"; {more}" if wide else ""
    return [Finding("error", "warning" if wide else "ok", f"{text}.", "client")]


def top_failure(summary: Summary) -> list[Finding]:
    """Return the most frequent reason for which requests were not complete."""
    result = [(example, kind) for kind, examples in summary.requests.examples.items() for example in examples]
    result = [pair for pair in result if pair[1] != "cancelled"]
    if not result or not summary.requests.errors:
        return []
    top, kind = max(result, key=lambda pair: pair[0].count)
    words = f": “{top.detail}”" if top.detail else ""
    text = f"Most frequent: {top.count:,} x {kind}{words}."
    return [Finding("failure", "warning" if kind == "rejected" else "error", text, "failures")]


def delivery_sentence(summary: Summary) -> str:
    """Requested against actual load; nothing when nothing was asked."""
    sent = summary.delivery
    if not sent.asked:
        return ""
    noun, gone = ("session", "begun") if summary.run.load.sessions else ("request", "sent")
    parts = [f"{sent.sent:,} of {pluralise(sent.asked, noun)} {gone}"]
    rate, variation, check = sent.rate_per_s, sent.cv, sent.ks.sent
    if rate.named is not None and rate.sent is not None:
        parts.append(f"{significant(rate.sent, 4)} /s (target {significant(rate.named, 4)})")
    if variation.named and variation.sent is not None:
        parts.append(f"inter-arrival CV {significant(variation.sent)} (target {significant(variation.named)})")
    if check is not None:
        fit = "distribution as requested" if check.p_value >= UNLIKELY else "distribution not as requested"
        parts.append(f"{fit} (Kolmogorov-Smirnov p = {significant(check.p_value, 2)})")
    elif sent.ks.due is not None:
        parts.append("sent too late to check the distribution")
    if sent.late_s is not None:
        parts.append(f"p99 dispatch delay {duration(sent.late_s.p99)}")
    return f"{', '.join(parts)}."


def delivered_as_requested(summary: Summary) -> bool:
    """Whether everything was sent, at instants that the arrivals requested may well have had."""
    checks = (summary.delivery.ks.due, summary.delivery.ks.sent)
    return not summary.delivery.not_sent and all(check is None or check.p_value >= UNLIKELY for check in checks)


def goodput_sentences(summary: Summary) -> list[str]:
    """How many requests met the bounds, and which bounds 90 % would have met; nothing where none were stated."""
    result = summary.goodput
    if not result or not result.requests:
        return []
    low, high = (significant(end * 100, 3) for end in result.attainment_ci95)
    due = "" if summary.window.whole else " due in the window"
    good = f"{result.good:,} of {pluralise(result.requests, 'request')}{due} met {' and '.join(result.bounds)}"
    text = f"Goodput {significant(result.per_s)} requests/s: {good}"
    text += f" ({percent(result.attainment)}, 95 %: {low} to {high} %)."
    if not (met := result.met_by["90%"]):
        return [text, "No bounds would have been met by 90 %: too many were not complete."]
    if not (bounds := bound_texts(met, " < ")):
        names = " and ".join(met.bounds_s)
        return [text, f"90 % would have met any bounds, however tight: their {names} is 0 or undefined."]
    scale = f" (bounds x{significant(met.scale)})" if met.scale else ""
    return [text, f"90 % would have met {' and '.join(bounds)}{scale}."]


def bound_texts(met: BoundsMet, sign: str) -> list[str]:
    """The bounds that a share of the requests would have met, such as `ttft < 300 ms`. Empty where these requests have
    no latency above 0, so that every bound holds and none can be named."""
    return [f"{name}{sign}{duration(bound)}" for name, bound in met.bounds_s.items() if bound > 0]


def _window(summary: Summary) -> list[Finding]:
    """Which part of the run the figures are of, what that leaves out, and whether the load became steady."""
    window = summary.window
    if window.unsteady:
        text = f"No steady state: {window.unsteady}, so latencies depend on how long the run was."
        return [Finding("window", "warning", text, "course")]
    if window.whole:
        return []
    ends = f"{significant(window.from_s)} s to {significant(window.to_s)} s"
    text = f"Measured from {ends} of the run ({window.reason}): {pluralise(window.requests, 'request')} due within."
    result = [Finding("window", "ok", text, "course")]
    if window_is_empty(summary):
        text = f"No complete request was due in the window, {ends} of the run: there are no latencies."
        result = [Finding("window", "warning", text, "course")]
    if left_out := window.outside:
        doubtful = left_out.slower or left_out.incomplete
        text = outside_window_sentence(window.requests + left_out.requests, left_out)
        result.append(Finding("outside", "warning" if doubtful else "ok", text, "course"))
    return result


def window_is_empty(summary: Summary) -> bool:
    """Whether requests completed, but none of those that were due in the window."""
    return bool(summary.requests.complete) and not summary.window.whole and not summary.latencies["e2e_s"].n


def outside_window_sentence(total: int, left_out: OutsideWindow) -> str:
    """Describe the requests outside the window: how many, how they ended, and the slowest."""
    parts = [f"{left_out.requests:,} of {pluralise(total, 'request')} outside the window"]
    if left_out.incomplete:
        parts.append(", ".join(f"{number:,} {state}" for state, number in left_out.incomplete.items()))
    if left_out.slowest_s is not None:
        longer = _longer(left_out.slowest_inside_s) if left_out.slower_whole else ""
        parts.append(f"the slowest took {duration(left_out.slowest_s)}{longer}")
    if left_out.slower_first and not left_out.slower_whole:
        first = f"the slowest first token took {duration(left_out.slowest_ttft_s)}"
        parts.append(first + _longer(left_out.slowest_ttft_inside_s))
    return f"{'; '.join(parts)}."


def _longer(inside_s: float | None) -> str:
    return "" if inside_s is None else f", longer than any inside ({duration(inside_s)})"


def littles_law_sentence(summary: Summary) -> str:
    """Say that throughput and latency contradict the measured number in flight; nothing where they agree."""
    law, mean_s = summary.littles_law, summary.latencies["e2e_s"].mean
    if law is None or (law.holds and law.covers):
        return ""
    product = f"{significant(summary.throughput.requests_per_s)} requests/s x {duration(mean_s)} mean E2E"
    product += f" = {significant(law.expected)} in flight by Little's law"
    measured = f"{significant(law.in_flight)} measured"
    if law.holds:
        taken = f"{significant(law.incomplete)} of them in requests that did not complete"
        return f"Latencies leave out much of what filled the server: {product}, {measured}, {taken}."
    tolerance = f"tolerance ±{significant(law.tolerance, 2)}"
    return f"Throughput and latencies contradict each other: {product}, {measured} ({tolerance})."


def hardware_limit_sentence(found: HardwareLimit) -> str:
    """Return sentences on what the hardware allows for the load, and on how much of that was reached."""
    rate, cards = significant(found.output_tokens_per_s, 4), f"{found.gpus} x {found.gpu}"
    text = f"Hardware limit{times_speed(found.speed)} ({cards}, {found.model}, {found.format}): "
    text += f"{percent(found.throughput_share)} of {rate} tokens/s, bound by {found.bound}."
    if found.tpot_ratio is not None:
        text += f" TPOT is {significant(found.tpot_ratio, 2)} times the {found.tpot_bound} limit"
        text += f" of {duration(found.tpot_s)}."
    if found.ttft_ratio is not None:
        text += f" TTFT is {significant(found.ttft_ratio, 2)} times one prompt's {duration(found.ttft_s)}."
    used = [f"{name} {percent(part)}" for name, part in (("MBU", found.mbu), ("MFU", found.mfu)) if part is not None]
    text += (
        f" {', '.join(used)}; at {significant(found.decoding, 2)} decoding {percent(found.overhead_share)} of a step"
    )
    text += f" is overhead ({found.framework}, as measured elsewhere)."
    if found.exceeds_limit:
        text += " No GPU is faster than its limit: is it another, or are there more? Name them with --gpu-model."
    return text


def memory_sentences(summary: Summary) -> list[str]:
    """What is known of memory: the KV cache, the GPUs, the server's processes. Often nothing."""
    result = summary.memory
    if not result:
        return []
    lines = []
    if (cache := result.kv_cache) and cache.peak_share is not None:
        room = f" of {cache.tokens:,} tokens" if cache.tokens else ""
        peak = f"peak {percent(cache.peak_share)}"
        if cache.peak_fullest_share is not None:
            room += f" in {cache.engines} engines"
            peak += f" on average and {percent(cache.peak_fullest_share)} in the fullest"
        lines.append(f"KV cache{room}: {peak}, by the server's own gauge.")
    lines += [_level(each) for each in result.gpus[:GPUS_NAMED] if each.peak_bytes is not None]
    if (more := len(result.gpus) - GPUS_NAMED) > 0:
        lines.append(f"{pluralise(more, 'more GPU')} in summary.json.")
    if result.taken_at_start and lines:
        lines.append(f"{result.taken_at_start.note}.")
    return lines + [
        _level(process) for process in result.processes if process.on == "host" and process.peak_bytes is not None
    ]


def _level(each: MemoryLevels) -> str:
    name = f" ({named})" if (named := getattr(each, "name", "")) else ""
    total = getattr(each, "total_bytes", None)
    whole = f" of {byte_size(total)}" if total else ""
    before = f"{byte_size(each.idle_bytes)} before the first request, " if each.idle_bytes is not None else ""
    return f"{each.of[0].upper()}{each.of[1:]}{name}: {before}peak {byte_size(each.peak_bytes)}{whole}."


def _counters(summary: Summary) -> list[Finding]:
    """Whether the server counted the same."""
    counters = [(title, each) for word, title in COUNTED.items() if (each := summary.server_counters.get(word))]
    result = []
    if same := [title for title, each in counters if each.agree and (title != "rejections" or each.server)]:
        warmup = summary.requests.warmup
        included = f", {pluralise(warmup, 'warm-up request')} included" if warmup else ""
        listed = " and ".join(filter(None, (", ".join(same[:-1]), same[-1])))
        result.append(Finding("counters", "ok", f"The server counted the same {listed}{included}.", "machines"))
    for title, each in counters:
        if each.agree is False:
            maximum = "" if each.client_most is None else f" to {each.client_most:,}"
            text = f"The server counted {each.server:,} {title}, the client {each.client:,}{maximum}: {each.why}."
            result.append(Finding("counters", "warning", text, "machines"))
    return result


def _warnings(summary: Summary) -> list[Finding]:
    run, client = summary.run, summary.client
    merged = f"{client.first_token_merged:,} of {summary.requests.sent:,} first tokens coalesced with later ones"
    reopened = f"{pluralise(client.reopened, 'connection')} closed by the server and reopened."
    again = (
        f"{pluralise(client.sent_again, 'request')} sent again: the server closed idle connections as requests left. "
    )
    again += "TTFT counts from the second send, latency from the due instant counts both."
    pauses = pluralise(client.pauses or 0, "time")
    paused = f"The closed loop waited {pauses}, {duration(client.paused_s)} of its clients' time"
    paused += " in all, because requests failed or were rejected at once (no connection, overload, status 5xx)."
    part = "Still going on: figures are of what is recorded so far; `loadgen report` makes them again."
    if not run.going_on:
        part = "Interrupted: figures are of the part that was recorded."
    damaged = f"{pluralise(run.damaged_lines, 'damaged line')} of the run file left out."
    proxy = f"docker-proxy forwards every byte from {summary.server.url}, and its delay is in every latency."
    proxy += f' Measure {summary.server.proxied_to}, or set "userland-proxy": false for the Docker engine.'
    warming = f"{summary.requests.warmup_incomplete:,} of {pluralise(summary.requests.warmup, 'warm-up request')}"
    said = [
        ("warmup", summary.requests.warmup_incomplete, f"{warming} did not complete.", "failures"),
        *(("bottleneck", True, f"{reason[0].upper()}{reason[1:]}.", "client") for reason in client.reasons),
        ("proxy", summary.server.proxied_to, proxy, "client"),
        ("forced", run.forced, f"Measured with --force: {run.forced}.", ""),
        ("interrupted", run.interrupted, part, ""),
        ("damaged", run.damaged_lines, damaged, ""),
        ("coalesced", client.first_token_merged, f"{merged}: TTFT is an upper bound.", "client"),
        ("reopened", client.reopened, reopened, "client"),
        ("sent-again", client.sent_again, again, "client"),
        ("pauses", client.pauses, paused, "client"),
        *(("note", True, f"{note}.", "") for note in run.notes),
    ]
    return [Finding(name, "warning", text, anchor) for name, holds, text, anchor in said if holds]


def measured_text(entry: ObjectiveVerdict) -> str:
    """What was measured of an objective, and what that leaves out."""
    out = f"; {pluralise(entry.left_out, 'request')} not complete and left out" if entry.left_out else ""
    return f"{entry.said}{out}"


def objectives_finding(summary: Summary) -> Finding | None:
    """How many objectives passed, at the level of the worst; None where none was stated."""
    said = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive"}
    counts = Counter[str](objective.verdict for objective in summary.objectives)
    text = ", ".join(f"{counts[name]} {word}" for name, word in said.items() if counts[name])
    level: Level = "error" if counts["fail"] else "warning" if counts["inconclusive"] else "ok"
    return Finding("objectives", level, f"{text}.", "objectives") if text else None
