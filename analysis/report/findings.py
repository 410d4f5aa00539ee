"""Derives the findings of a run: facts that readers must know before they use the run's figures.

`findings` returns all findings, and `verdict` summarises them. A finding is a sentence with a level:

- `ok`: a check passed.
- `note`: the finding is for information only.
- `warning`: the figures are usable with care.
- `error`: something failed, or the figures do not describe the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from loadgen.analysis.cached_prompts import CachedPrompts
from loadgen.analysis.canaries import WRONG, CanaryFigures
from loadgen.analysis.checked_texts import SUSPECT
from loadgen.analysis.client_health import RING_OFF
from loadgen.analysis.format import (
    byte_size,
    confidence_interval,
    duration,
    percent,
    pluralise,
    significant,
    times_speed,
    unit_of,
)
from loadgen.analysis.hardware_limit import HardwareLimit
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import BoundsMet, ObjectiveVerdict
from loadgen.analysis.report import Bullet, Bullets, Finding, Level
from loadgen.analysis.report.course_findings import course_findings
from loadgen.analysis.summary import (
    ClientHealth,
    Delivery,
    LengthDifference,
    MemoryLevels,
    OutsideWindow,
    RemovedPart,
    RequestCounts,
    RunInfo,
    ServerInfo,
    ServerTiming,
    SessionFigures,
    Summary,
    TimePart,
    TruncatedInputs,
)
from loadgen.servers.backends import BACKENDS, join_or
from loadgen.servers.gateways import gateways_without_remedy, streaming_remedies

COUNTED = {
    **{"prompt_tokens": "prompt tokens", "output_tokens": "output tokens"},
    **{"requests_finished": "finished requests", "rejections": "rejections"},
}
"""Counters that both the server and the client have, by the name in summary.json, with their displayed names."""
INCOMPLETE = {
    "connect": "without a connection",
    "client_limit": "that this machine could not send",
    "timeout": "timed out",
    "http_status": "with other HTTP errors",
    "rejected": "rejected",
    "in_band_error": "with an error inside the stream",
    "protocol": "with a malformed response",
    "truncated": "truncated",
    "wrong_length": "longer than requested",
    "dropped": "dropped",
    "session_ended": "never sent after the end of their session",
    "cancelled": "stopped with the run",
    "not_encoded": "that cannot be encoded",
    "worker_lost": "lost with their worker",
}
"""Reasons why requests are not complete, by error kind. A number precedes each reason in texts."""
CANARY_KINDS = {
    "other_prompt": "to another prompt",
    "empty": "without text",
    "replacement": "with U+FFFD",
    "different": "different from the beginning",
}
"""Kinds of wrong answers to canaries. A number precedes each kind in texts."""
OK_STATUS = 200
"""HTTP status of responses whose stream was accepted. A server can still reject the request inside the stream."""
P_VALUE_MIN = 0.001
"""Minimum p-value of a load that has the requested distribution. One correct run in a thousand has a smaller one."""
OUTPUT_ERRORS_NAMED = 3
"""Maximum number of reasons that a report names for outputs that are not valid."""
SEVERAL_TOKENS_MIN = 1.05
"""Mean number of tokens per event from which a report mentions that events contain several tokens."""
RTT_SHOWN_S = 0.001
"""Round-trip time in seconds from which a report shows it beside TTFT."""
RTT_SHARE_MAX = 0.2
"""Round-trip time, as a share of the median TTFT, from which TTFT says more about the network than it should."""
OUTSIDE_SHARE, OUTSIDE_MIN_S = 0.2, 0.01
"""Minimum remainder of TTFT that causes a warning, as a share of TTFT and in seconds. The remainder is the time outside
the server's queue and prefill."""
LONGER_SHARE = 0.1
"""Minimum share of responses whose stated times are longer than the measured latency. From this share on, the report
contains a warning."""
NO_TIMES = "This server or gateway is not known to state them; a proxy can add a `Server-Timing` header."
CAPPED_SHARE = 0.9
"""Rate that was sent, as a share of the target rate, below which a report says that `--concurrency` limited it."""
PROMPTS_AS_REQUESTED = "all prompt lengths as requested"
OUTPUTS_AS_REQUESTED = "all output lengths as requested"
GPUS_NAMED = 4
"""Maximum number of GPUs that get a separate sentence on their memory."""
OVERLOADED = "overloaded"
HELD_BACK = "held-back"
"""Ids of findings that the status of a page names, because they change the meaning of every latency."""
SIMULATED = "simulated"
"""Id of the verdict on a simulation in virtual time, which has no client that could be valid or invalid."""
TOGETHER_RATIO = 3
"""Minimum ratio of the median TTFT of two replicas for a warning if all requests were sent at once."""
ERROR_MAX = 0.05
"""Maximum worst-case error of a latency, as a share of its median. A larger error is a warning."""


def findings(summary: Summary) -> list[Finding]:
    """Return all findings of a run. The first finding says whether the client was the limit."""
    client = summary.client
    result = [
        Finding("client", client_level(summary), client_sentence(summary), "client"),
        *_error_bars(client, summary),
        *filter(None, [priority(client)]),
        Finding("complete", outcome_level(summary.requests), outcome_sentence(summary), "failures"),
        *filter(None, [abandoned_finding(summary)]),
        Finding("lengths", _lengths_level(summary), lengths_sentence(summary), "lengths"),
        *streaming_findings(summary),
        *filter(None, [valid_outputs_finding(summary), *canary_findings(summary), expected_finding(summary)]),
        *filter(None, [speculation_finding(summary), tokens_per_event_finding(summary)]),
        *filter(None, [cached_prompts_finding(summary), held_back_finding(summary)]),
        *filter(None, [replicas_finding(summary), mixed_counters_finding(summary)]),
        *filter(None, [response_groups_finding(summary), network_finding(summary), server_timing_finding(summary)]),
    ]
    if summary.run.over_limit:
        text = f"Sent on purpose (--over-limit): {summary.run.over_limit}."
        result.append(Finding("over_limit", "note", text, "failures"))
    result += connection_findings(summary.server)
    delivery = delivery_sentence(summary)
    if delivery:
        level: Level = "ok" if delivered_as_requested(summary) else "warning"
        result.append(Finding("delivery", level, delivery, "sending"))
    if summary.sessions:
        result.append(Finding("sessions", "note", sessions_sentence(summary.sessions), "sessions"))
    untested = untested_distribution(summary)
    if untested:
        result.append(Finding("distribution", "note", untested, "sending"))
    capped = capped_rate_sentence(summary)
    if capped:
        result.append(Finding("capped", "note", f"{capped} Raise --concurrency to send at the target rate.", "sending"))
    if summary.machines:
        clocks = ", ".join(f"{machine.name} ±{duration(machine.uncertainty_s)}" for machine in summary.machines)
        text = f"{pluralise(len(summary.machines), 'machine')}, clock uncertainty: {clocks}."
        result.append(Finding("machines", "ok", text))
    result += [Finding("goodput", "note", text, "goodput") for text in goodput_sentences(summary)]
    result += _counters(summary)
    result += [*_window(summary), *course_findings(summary)]
    contradiction = littles_law_sentence(summary)
    if contradiction:
        result.append(Finding("littles_law", "warning", contradiction, "course"))
    result += [Finding("memory", "note", text, "machines") for text in memory_sentences(summary)]
    if summary.limit:
        level = "warning" if summary.limit.exceeds_limit else "note"
        result.append(Finding("limit", level, hardware_limit_sentence(summary.limit)))
    result += [*_warnings(summary), *filter(None, [cold_finding(summary), seed_finding(summary)])]
    if any(finding.level in ("warning", "error") for finding in result):
        # A green "Valid" next to a warning would contradict it.
        result[0] = replace(result[0], sentence=_without_verdict(result[0].sentence))
    return result


def _without_verdict(sentence: str) -> str:
    """Remove the prefix `Valid: ` from a sentence that has it, and capitalise the first letter."""
    text = sentence.removeprefix("Valid: ")
    return f"{text[0].upper()}{text[1:]}"


def sessions_sentence(sessions: SessionFigures) -> str:
    """Return a sentence about the sessions of a run.

    The sentence states the number of complete sessions and their durations. It also states how many requests followed
    other requests, and how late they were sent (p99).
    """
    text = f"{sessions.complete:,} of {pluralise(sessions.n, 'session')} complete"
    if sessions.makespan_s.p50 is not None:
        text += f", makespan p50 {duration(sessions.makespan_s.p50)}"
    text += f", at most {sessions.in_flight_peak:,} in flight"
    late = [edge.late_s.p99 for edge in sessions.edges if edge.late_s.p99 is not None]
    if late:
        followers = sum(edge.deciding for edge in sessions.edges)
        text += f"; {pluralise(followers, 'request')} followed others, sent p99 {duration(max(late))} late"
    if sessions.tool_share:
        text += f"; sessions waited for tools {percent(sessions.tool_share)} of the time"
    return f"{text}."


def verdict(summary: Summary, findings: Sequence[Finding]) -> Finding:
    """Return a finding that states whether the figures of the run are valid.

    `findings` are the other findings on the run. The result mentions how many of them are errors and warnings.
    """
    if not summary.requests.complete:
        reason = f", and {_invalid_reason(summary.client)}" if summary.client.client_limit else ""
        return Finding("invalid", "error", f"Invalid: no request was complete{reason}.")
    if window_is_empty(summary):
        return Finding("invalid", "error", "Invalid: no complete request was due in the window.")
    if not summary.client.ok:
        return Finding("invalid", "error", f"Invalid: {_invalid_reason(summary.client)}.")
    concerns = concerns_text(findings)
    if concerns:
        valid = "Simulated" if summary.server.virtual else "Valid"
        return Finding("warning", "warning", f"{valid}, with {concerns} below.")
    if summary.server.virtual:
        return Finding(SIMULATED, "note", "Simulated: figures of a model.")
    capped = capped_rate_sentence(summary)
    return Finding("valid", "ok", f"Valid: every check passed. {capped}".rstrip())


def concerns(known: Sequence[Finding]) -> list[Finding]:
    """Return the errors and warnings, except for the finding on incomplete requests, which reports show separately."""
    return [finding for finding in known if finding.level in ("warning", "error") and finding.id != "complete"]


def concerns_text(findings: Sequence[Finding]) -> str:
    """Return the number of errors and of warnings among the findings, such as `1 error and 2 warnings`.

    The result is an empty string if there are no errors and no warnings.
    """
    counts = Counter(finding.level for finding in findings)
    return " and ".join(pluralise(counts[level], level) for level in ("error", "warning") if counts[level])


def stopped_count(summary: Summary) -> int:
    """Return the number of failed requests that were cancelled when the run was stopped.

    In an interactive run, the number includes requests of simulated users whom the operator stopped earlier."""
    return summary.requests.errors.get("cancelled", 0)


def outcome_level(requests: RequestCounts) -> Level:
    """Return the level of the finding about the outcomes of all requests (`outcome_sentence`).

    - `ok`: every planned request is complete.
    - `warning`: every incomplete request was rejected.
    - `error`: a request is incomplete for another reason, or no request was planned.
    """
    if not requests.planned:
        return "error"
    if requests.all_complete:
        return "ok"
    return "warning" if requests.complete + requests.rejected == requests.planned else "error"


def outcome_sentence(summary: Summary) -> str:
    """Return a sentence that says that all requests are complete, or why some are not complete."""
    requests = summary.requests
    if not requests.planned:
        return "Nothing was sent."
    if requests.all_complete:
        return "The request is complete." if requests.planned == 1 else f"All {requests.planned:,} requests complete."
    return f"{incomplete_text([requests])}."


def abandoned_finding(summary: Summary) -> Finding | None:
    """Return a finding on requests that were abandoned on purpose, or None if there are none.

    The finding is a warning if the server still worked on such requests after the last response.
    """
    facts = summary.abandoned
    if facts is None:
        return None
    text = f"{pluralise(facts.requests, 'request')} abandoned on purpose ({facts.cancel})"
    if facts.stopped is not None:
        text += f"; the server counted {facts.stopped:,} that ended early"
    if facts.running_at_end is None:
        return Finding("abandoned", "note", f"{text}. Whether the server stopped them was not measured.", "failures")
    if not facts.running_at_end:
        return Finding("abandoned", "note", f"{text}. After the last response it ran none of them.", "failures")
    running = f"When the last response had ended, the server still ran or queued {facts.running_at_end:,}"
    later = f", and {facts.running_later:,} another {duration(facts.later_s)} later" if facts.later_s else ""
    return Finding("abandoned", "warning", f"{text}. {running}{later}.", "failures")


def incomplete_text(counts: Sequence[RequestCounts]) -> str:
    """Return text on the incomplete requests of these runs: their number, their share, and the reasons."""
    planned = sum(requests.planned for requests in counts)
    incomplete = planned - sum(requests.complete for requests in counts)
    parts = []
    for reason, count in incomplete_reasons(counts).items():
        parts.append(f"{count:,} x {reason}" if reason.startswith("HTTP") else f"{count:,} {reason}")
    share = percent(incomplete / planned)
    return f"{incomplete:,} of {pluralise(planned, 'request')} not complete ({share}): {', '.join(parts)}"


def incomplete_reasons(counts: Sequence[RequestCounts]) -> dict[str, int]:
    """Count the requests that are not complete, by reason. The most frequent reason comes first.

    The error kinds `http_status` and `rejected` are split by HTTP status, into reasons such as `HTTP 500` and `rejected
    (HTTP 503)`. Every reason can follow a number in a sentence.
    """
    reasons = Counter[str]()
    for requests in counts:
        for kind, count in requests.errors.items():
            remaining = count
            for example in requests.examples.get(kind, []) if kind in ("http_status", "rejected") else ():
                if example.http_status is not None and example.http_status != OK_STATUS:
                    status = f"HTTP {example.http_status}"
                    reasons[status if kind == "http_status" else f"rejected ({status})"] += example.count
                    remaining -= example.count
            reasons[INCOMPLETE.get(kind, kind)] += remaining
        reasons["without a record"] += requests.unrecorded
        explained = sum(requests.errors.values()) + requests.unrecorded
        reasons["for an unknown reason"] += requests.planned - requests.complete - explained
    return {reason: count for reason, count in reasons.most_common() if count > 0}


def connection_findings(server: ServerInfo) -> list[Finding]:
    """Return notes on the connection from the client to the server.

    There is one note if a proxy was used, one if the server accepts only HTTP/2, and one if it has several addresses.
    """
    texts = {"proxy": "", "protocol": "", "addresses": addresses_sentence(server)}
    if server.proxy:
        texts["proxy"] = f"Connections went through the proxy {server.proxy}. Latencies include the time in the proxy."
    if server.protocol:
        texts["protocol"] = (
            f"The server accepts only {server.protocol}. A local process translated the requests to streams of shared "
            "connections; timestamps are those of the reads behind it."
        )
    return [Finding(name, "note", text, "failures") for name, text in texts.items() if text]


def addresses_sentence(server: ServerInfo) -> str:
    """Return a sentence on the addresses of the server's host name, or an empty string if it has only one address.

    If the run had several URLs, the sentence names those whose host name has several addresses.
    """
    unused = [f"{address} was not used ({reason})" for address, reason in server.addresses_unused.items()]
    used = [
        f"connections to {url} went in turn to {', '.join(addresses)}"
        for url, addresses in server.replicas.items()
        if len(addresses) > 1
    ]
    if not server.replicas:
        if len(server.addresses) < 2 and not unused:
            return ""
        verb = "went in turn to" if len(server.addresses) > 1 else "went to"
        used = [f"connections {verb} {', '.join(server.addresses)}"]
    text = "; ".join([*used, *unused])
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _lengths_level(summary: Summary) -> Level:
    tokens = summary.tokens
    mismatches = (tokens.prompt_mismatches and summary.run.prompts_exact) or tokens.output_mismatches
    unknown = tokens.prompt_unreported or tokens.truncated or _counted_by_chunks(summary)
    if summary.run.has_audio and summary.requests.complete:
        return "note" if _unknown_durations(summary) else "ok"
    if mismatches or unknown or not summary.requests.complete:
        return "warning"
    return "note" if summary.run.may_end or tokens.prompt_mismatches else "ok"


def lengths_sentence(summary: Summary) -> str:
    """Return a sentence that compares the reported and the requested lengths of prompts and outputs."""
    tokens, complete = summary.tokens, summary.requests.complete
    if complete == 0:
        return "Lengths not checked: no request was complete."
    if summary.run.has_audio:
        return _audio_sentence(summary)
    prompt = PROMPTS_AS_REQUESTED
    if tokens.prompt_mismatches:
        prompt = _different_prompts(summary)
    if tokens.prompt_unreported:
        prompt = f"prompt length not reported for {pluralise(tokens.prompt_unreported, 'request')}"
    elif tokens.prompt_unknown == complete:
        prompt = "prompt lengths not known beforehand"
    elif tokens.prompt_unknown:
        included = "earlier outputs" if summary.run.load.sessions else "more than text"
        known = pluralise(complete - tokens.prompt_unknown, "request")
        prompt = (
            f"prompt lengths as requested for {known}, and not known beforehand for {tokens.prompt_unknown:,}, as they "
            f"included {included}"
        )
    sentence = f"{prompt[0].upper()}{prompt[1:]}"
    if not summary.generates:
        return f"{sentence}."
    outputs = _output_lengths(summary)
    if (prompt, outputs) == (PROMPTS_AS_REQUESTED, OUTPUTS_AS_REQUESTED):
        of = " of complete requests" if summary.requests.truncated else ""
        return f"All prompt and output lengths{of} as requested."
    return f"{sentence}; {outputs}."


def _unknown_durations(summary: Summary) -> int:
    """Return the number of recordings or responses whose duration is unknown, so that they have no real-time factor."""
    return summary.latencies["e2e_s"].n - summary.latencies["rtf"].n


def _audio_sentence(summary: Summary) -> str:
    """Return a sentence about the lengths of recordings (for transcriptions) or of audio responses.

    If some of these lengths are unknown, the sentence says how many. Otherwise, the sentence says that lengths are not
    compared with the requested ones, because audio has no tokens.
    """
    unknown = _unknown_durations(summary)
    if not unknown:
        return "Lengths not compared: audio has no tokens."
    noun = "recordings" if summary.server.endpoint == "transcriptions" else "responses"
    return (
        f"The duration of {unknown:,} of {summary.latencies['e2e_s'].n:,} {noun} is unknown, because only WAV and FLAC "
        "files state it: RTF covers the others, and there is no RTFx."
    )


def _different_prompts(summary: Summary) -> str:
    """Return a text on prompts with a wrong length, such as `3 of 100 prompt lengths not as requested`.

    If loadgen could not make prompt lengths exact, the text compares with the estimated lengths instead. When all sent
    requests are complete, it then also states the total number of prompt tokens: the number reported by the server, and
    the requested number.

    If the server truncated inputs, the text is only about these inputs.
    """
    tokens, complete = summary.tokens, pluralise(summary.requests.complete, "prompt length")
    if tokens.truncated:
        return _truncated_inputs(summary, tokens.truncated)
    if summary.run.prompts_exact:
        return f"{tokens.prompt_mismatches:,} of {complete} not as requested"
    total = ""
    if summary.requests.complete == summary.requests.sent:
        total = f": {tokens.prompt_reported:,} tokens in total, {tokens.prompt_asked:,} requested"
    return f"{tokens.prompt_mismatches:,} of {complete} differ from the estimate{total}"


def _truncated_inputs(summary: Summary, truncated: TruncatedInputs) -> str:
    """Return a clause on inputs that the server truncated to its maximum length."""
    length = f"{truncated.tokens:,} tokens"
    if truncated.every_input:
        return f"the server truncated all inputs to {length}"
    requests = pluralise(summary.requests.complete, "request")
    return f"the server truncated inputs of {truncated.requests:,} of {requests} to {length}"


def _output_lengths(summary: Summary) -> str:
    """Return a text that compares the output lengths of complete responses with the requested lengths.

    The text states how many responses ended early and how many were too long. For each of these two groups, it also
    states the mean length, and the reason if this is known.

    For some responses, only the chunks can be counted, and not the tokens. If there are such responses, the text only
    says that their output lengths are unknown.
    """
    tokens, complete = summary.tokens, summary.requests.complete
    chunks_only = _counted_by_chunks(summary)
    if chunks_only:
        return f"output lengths unknown for {pluralise(chunks_only, 'request')}, as only chunks were counted"
    early, longer = tokens.output_early, tokens.output_longer
    parts = []
    if early:
        subject = f"{early.responses:,} of {pluralise(complete, 'response')}"
        parts.append(f"{subject} ended early, after {_mean_tokens(early, 'of')}")
    if longer:
        subject = f"{longer.responses:,}" if early else f"{longer.responses:,} of {pluralise(complete, 'response')}"
        verb = "was" if longer.responses == 1 else "were"
        parts.append(f"{subject} {verb} longer than requested: {_mean_tokens(longer, 'tokens instead of')}")
    if not parts and tokens.output_mismatches:  # summaries of older versions only have this total
        parts.append(f"{tokens.output_mismatches:,} of {pluralise(complete, 'output length')} not as requested")
    clauses = [", and ".join(parts) or OUTPUTS_AS_REQUESTED]
    clauses += dict.fromkeys(difference.why for difference in (early, longer) if difference and difference.why)
    if summary.run.may_end:
        clauses.append("responses were allowed to end early, so runs are not strictly comparable")
    return "; ".join(clauses)


def _mean_tokens(difference: LengthDifference, between: str) -> str:
    """Return the mean actual and the mean requested output length as text, such as `50 of 128 tokens on average`.

    `difference` describes either the responses that are too short or those that are too long. `between` is the word
    between the two numbers, such as `of`.
    """
    means = (difference.tokens_mean, difference.requested_mean)
    mean, requested = (f"{value:,.1f}".removesuffix(".0") for value in means)
    unit = " tokens" if between == "of" else ""
    average = " on average" if difference.responses > 1 else ""
    return f"{mean} {between} {requested}{unit}{average}"


def streaming_findings(summary: Summary) -> list[Finding]:
    """Return findings on tokens that were not streamed, on unknown chunk sizes and on contradictory token counts."""
    tokens, complete = summary.tokens, summary.requests.complete
    counts = tokens.streamed_by
    result = list[Finding]()
    contradicted = counts.get("contradicted", 0)
    if contradicted:
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
            f"{pluralise(complete, 'response')} (hidden reasoning, for example). TPOT and ITL cover the streamed "
            "tokens; lengths and throughput cover all tokens."
        )
        assumed = counts.get("assumed_hidden", 0)
        if assumed:
            text += (
                f" For {pluralise(assumed, 'response')} this is assumed from text and timing: the tokens may also have "
                "been streamed without text."
            )
        result.append(Finding("tokens-hidden", "warning" if assumed else "note", text, "lengths"))
    result += filter(None, [reasoning_finding(summary)])
    without_text = counts.get("without_text", 0)
    if without_text:
        text = (
            f"{tokens.without_text:,} generated tokens came without text, in {without_text:,} of "
            f"{pluralise(complete, 'response')}: the server reports no hidden reasoning. TPOT and ITL assume that all "
            "tokens are spread evenly over the chunks."
        )
        result.append(Finding("tokens-without-text", "note", text, "lengths"))
    spread = counts.get("spread", 0)
    if spread:
        text = (
            f"The server does not say how many tokens the chunks of {spread:,} of {pluralise(complete, 'response')} "
            f"hold: {significant(tokens.spread_per_chunk or 0.0)} on average. TPOT and ITL assume that "
            "tokens are spread evenly over the chunks."
        )
        result.append(Finding("tokens-spread", "note", text, "lengths"))
    return result


def reasoning_finding(summary: Summary) -> Finding | None:
    """Return a finding on the reasoning tokens of the responses, or None if no response has reasoning.

    The finding is a warning if responses ended during the reasoning.
    """
    tokens = summary.tokens
    if not tokens.reasoning_requests:
        return None
    responses = pluralise(summary.requests.complete, "response")
    text = f"{tokens.reasoning:,} output tokens are reasoning, in {tokens.reasoning_requests:,} of {responses}."
    if not tokens.unanswered_requests:
        return Finding("reasoning", "note", text, "lengths")
    share = ""
    if summary.answered is not None:
        high, low = (significant((1 - end) * 100) for end in summary.answered.share_ci95)
        share = f" ({percent(1 - summary.answered.share)}, {confidence_interval(low, high)}%)"
    text += (
        f" {tokens.unanswered_requests:,} of {responses} never reached an answer{share}. They ended during the "
        "reasoning and have no TTFA, and a bound on TTFA counts them as not met. Raise --output-tokens."
    )
    return Finding("reasoning", "warning", text, "lengths")


def valid_outputs_finding(summary: Summary) -> Finding | None:
    """Return a finding on tool calls and JSON that fit their schemas, or None if the requests had no schema."""
    outputs = summary.outputs
    if outputs is None:
        return None
    sentences = []
    if outputs.checked:
        low, high = (significant(end * 100) for end in outputs.share_ci95)
        share = f"{percent(outputs.share)}, {confidence_interval(low, high)}%"
        responses = pluralise(outputs.checked, "response")
        sentences.append(f"{outputs.valid:,} of {responses} with a tool call or JSON are valid ({share}).")
    if outputs.errors:
        reasons = [f"{count:,} x {reason}" for reason, count in [*outputs.errors.items()][:OUTPUT_ERRORS_NAMED]]
        sentences.append(f"{'; '.join(reasons)}.")
    if outputs.uncalled:
        sentences.append(f"{pluralise(outputs.uncalled, 'response')} did not call the tools that they could call.")
    invalid = outputs.valid < outputs.checked or outputs.unchecked
    return Finding("outputs", "warning" if invalid else "note", " ".join(sentences), "failures")


def speculation_finding(summary: Summary) -> Finding | None:
    """Return a finding on the acceptance of draft tokens, or None if the server does not report it."""
    speculation = summary.speculation
    if speculation is None:
        return None
    parts = []
    if speculation.acceptance_length is not None:
        parts.append(f"{significant(speculation.acceptance_length)} tokens per decode step on average")
    if speculation.acceptance_rate is not None:
        parts.append(f"{percent(speculation.acceptance_rate)} of the draft tokens accepted")
    source = {
        "responses": "from the responses",
        "counters": "from the server's counters",
        "gauges": "mean of the server's own values",
    }[speculation.source]
    return Finding("speculation", "note", f"Speculative decoding: {', '.join(parts)} ({source}).", "gaps")


def tokens_per_event_finding(summary: Summary) -> Finding | None:
    """Return a finding on events with several tokens, or None if nearly all events contain one token."""
    result = summary.tokens_per_event
    if result is None or result.mean < SEVERAL_TOKENS_MIN or not result.counts:
        return None
    text = (
        f"Events contain {significant(result.mean)} tokens on average. ITL is 0 between the tokens of one event, so "
        "ICL shows the time between events."
    )
    return Finding("tokens-per-event", "note", text, "gaps")


def cold_finding(summary: Summary) -> Finding | None:
    """Return a finding on whether --cold emptied the server's prefix cache, or None without this option."""
    known: dict[str, tuple[Level, str]] = {
        "emptied": ("note", "The server's prefix cache was emptied before the run, which was checked (--cold)."),
        "unused": ("note", "The server uses no prefix cache (--cold)."),
        "unchecked": (
            "warning",
            "The server's prefix cache was emptied, but the result could not be checked (--cold).",
        ),
    }
    level, text = known.get(summary.run.cold, ("note", ""))
    return Finding("cold", level, text) if text else None


def seed_finding(summary: Summary) -> Finding | None:
    """Return a note on how to repeat a run whose seed was drawn at random, or None for any other run."""
    if summary.run.seed_choice != "random":
        return None
    text = f"The seed was drawn at random. --seed {summary.run.seed} sends the same requests again."
    return Finding("seed", "note", text)


def canary_findings(summary: Summary) -> list[Finding]:
    """Return findings on the answers to canaries (test prompts of --verify), and on responses with suspect texts."""
    result = []
    canaries = summary.canaries
    if canaries is not None:
        result.append(Finding("canaries", _canaries_level(canaries), canaries_sentence(canaries), "canaries"))
    suspect = summary.suspect_texts
    if suspect is not None and suspect.counts:
        counts = [f"{count:,} {SUSPECT[mark]}" for mark, count in suspect.counts.items()]
        level: Level = "warning" if suspect.counts.keys() - {"looping_text"} else "note"
        text = f"Of {pluralise(suspect.checked, 'response')} whose text was checked: {', '.join(counts)}."
        if "looping_text" in suspect.counts:
            text += " Models often repeat themselves after the end of an answer, which --no-ignore-eos avoids."
        result.append(Finding("suspect-texts", level, text))
    return result


def _canaries_level(canaries: CanaryFigures) -> Level:
    """Return the level of the finding on canaries (test prompts of --verify).

    The first of these conditions that holds decides:

    - An answer under load is wrong: `error` if the answers without load were all reproducible, otherwise `warning`.
    - No canary was answered under load, or a canary got no complete answer: `warning`.
    - All answers under load are equal to the answers without load: `ok`.
    - An answer under load differs, but is not wrong: `note`.
    """
    if canaries.wrong:
        return "error" if canaries.alone and canaries.alone_same == canaries.alone else "warning"
    if not canaries.answers or canaries.failed:
        return "warning"
    return "ok" if canaries.same == canaries.answers else "note"


def canaries_sentence(canaries: CanaryFigures) -> str:
    """Return sentences on the answers to canaries (test prompts of --verify).

    If answers under load are wrong, the sentences may also state a limit: up to this number of requests in flight, the
    answers are right.
    """
    if not canaries.answers or canaries.share_ci95 is None:
        return (
            f"Answers under load were not checked: {canaries.canaries} canaries were answered before the load, and "
            f"none during the load. {canaries.failed:,} requests with canaries failed."
        )
    low, high = (f"{end * 100:.3g}" for end in canaries.share_ci95)
    text = (
        f"{canaries.same:,} of {canaries.answers:,} canaries had the same answer under load as without load "
        f"({percent(canaries.share)}, 95% CI {low}\u2013{high}%)"
    )
    parts = [f"{text}."]
    if canaries.wrong:
        kinds = ", ".join(f"{canaries.kinds[kind]:,} {CANARY_KINDS[kind]}" for kind in WRONG if kind in canaries.kinds)
        parts.append(f"{canaries.wrong:,} answers are wrong: {kinds}.")
        if canaries.right_to is not None:
            parts.append(
                f"Answers are right with up to {canaries.right_to:,} requests in flight, and wrong from "
                f"{canaries.wrong_from:,} on."
            )
    diverging = canaries.kinds.get("diverges", 0)
    if diverging:
        parts.append(
            f"{pluralise(diverging, 'answer')} begin{'s' if diverging == 1 else ''} in the same way and then "
            f"differ{'s' if diverging == 1 else ''}, which rounding errors in other batches also cause."
        )
    if canaries.alone_same < canaries.alone:
        parts.append(
            f"Without load, {canaries.alone - canaries.alone_same:,} of {canaries.alone:,} answers after the load also "
            "differ from those before, so the server's answers are not reproducible."
        )
    if not canaries.alone:
        parts.append("None was answered after the load, so it is unknown whether the answers are reproducible.")
    if canaries.failed:
        parts.append(f"{pluralise(canaries.failed, 'request')} with canaries failed.")
    return " ".join(parts)


def expected_finding(summary: Summary) -> Finding | None:
    """Return a finding on the number of responses that contain the text that their request expects.

    Return None if no request states an expected text.
    """
    texts = summary.expected_texts
    if texts is None:
        return None
    low, high = (f"{end * 100:.3g}" for end in texts.share_ci95)
    text = (
        f"{texts.expected:,} of {texts.checked:,} responses contain the expected text ({percent(texts.share)}, 95% CI "
        f"{low}\u2013{high}%)."
    )
    return Finding("expected-texts", "ok" if texts.expected == texts.checked else "warning", text)


def cached_prompts_finding(summary: Summary) -> Finding | None:
    """Return a finding on prompt tokens from the server's prefix cache, or None if there are none.

    The finding is a warning if the prompts were meant to be new to the server.
    """
    cached = summary.cached_prompts
    if cached is None or not cached.tokens:
        return None
    share = f"{cached.tokens:,} of {cached.prompt_tokens:,} prompt tokens ({percent(cached.share)})"
    text = f"{share} came from the server's prefix cache"
    if cached.source == "responses" and cached.server_share is not None:
        text += f" ({percent(cached.server_share)} by the server's counters)"
    if not cached.unexpected:
        return Finding("cached-prompts", "note", f"{text}.", "counters")
    text = f"{text}, so the server did not compute these prompts, and TTFT and throughput are too good."
    return Finding("cached-prompts", "warning", f"{text} {_cache_cause(summary.run, cached)}", "counters")


def _cache_cause(run: RunInfo, cached: CachedPrompts) -> str:
    """Return sentences on why the server probably had the prompts of a run in its cache, and on how to avoid this."""
    remedy = "Leave --seed out, or empty the cache with --cold (vLLM, SGLang)."
    if cached.sent_before:
        when = cached.sent_before[:19].replace("T", " ")
        return f"This machine sent the prompts of --seed {run.seed} to this server before ({when} UTC). {remedy}"
    if run.seed_choice == "random":
        return (
            "The seed of this run is new, so the prompts have a common beginning, such as a system prompt or a chat "
            "template, or something in front of the server caches them."
        )
    return f"Another run with --seed {run.seed} probably sent the same prompts. {remedy}"


def held_back_finding(summary: Summary) -> Finding | None:
    """Return a warning if a proxy or the server holds tokens back, or None if the tokens arrive one after the other.

    Tokens that are held back arrive in groups. A client that reads late can also cause groups of tokens, if the
    timestamp of a token is the time of its read. If the client was the limit in such a run, return None. Another
    finding then reports that the client was the limit.
    """
    held = summary.held_back
    if held is None or not held.common or (summary.client.source.by_read and not summary.client.ok):
        return None
    which = f"{held.responses:,} of {pluralise(held.examined, 'response')}"
    if held.in_one_piece >= 0.5 * held.responses:
        seen = f"{which} arrived in one piece, so TTFT is about the E2E latency and ITL is about 0."
    else:
        seen = (
            f"The tokens of {which} arrived in groups of about {held.chunks_per_group:,.0f}, and "
            f"{percent(held.zero_gap_share)} of their gaps are about 0."
        )
    gateways = () if summary.network is None else summary.network.gateways
    remedies = streaming_remedies(gateways)
    unknown = gateways_without_remedy(gateways)
    text = (
        f"{seen} A proxy or the server buffers the stream, so TTFT, TPOT and ITL describe the buffer. "
        f"Remedies: {', '.join(remedies)}, or a --url without the proxy."
    )
    if unknown:
        text += f" No such setting is known for {', '.join(unknown)}."
    return Finding(HELD_BACK, "warning", text, "latencies")


def replicas_finding(summary: Summary) -> Finding | None:
    """Return a finding if the replicas of the server differ more than by chance, or None if they do not.

    The finding is a warning, or a note if all requests were sent at once and the difference is moderate.
    """
    difference = summary.replica_difference
    if difference is None:
        return None
    text = (
        f"The replicas differ: the median TTFT is {duration(difference.fastest_ttft_s)} on {difference.fastest} and "
        f"{duration(difference.slowest_ttft_s)} on {difference.slowest}. Figures of the whole run mix them."
    )
    if difference.together and difference.slowest_ttft_s < TOGETHER_RATIO * difference.fastest_ttft_s:
        text += (
            " All requests were sent at once, so this may be one delay: only --repeats shows whether it is the replica."
        )
        return Finding("replicas", "note", text, "replicas")
    return Finding("replicas", "warning", text, "replicas")


def mixed_counters_finding(summary: Summary) -> Finding | None:
    """Return a warning if the metrics page mixes the counters of several replicas, or None if it does not."""
    if not summary.mixed_replicas:
        return None
    text = (
        "The server's counters jump back and forth between series that only grow: these are the counters of at least "
        f"{summary.mixed_replicas} replicas behind one address. The counters are not used, and other figures from the "
        "metrics page, such as the use of the KV cache, are those of one replica at a time. Remedy: repeat --url, "
        "once for each replica."
    )
    return Finding("mixed-counters", "warning", text, "counters")


def response_groups_finding(summary: Summary) -> Finding | None:
    """Return a warning if the TTFTs of the run form two separate groups, otherwise None.

    One possible cause is a URL that leads to a fast and a slow replica. If another finding already names the replicas
    that differ, the result is None too.
    """
    groups = summary.response_groups
    if groups is None or summary.replica_difference is not None:  # the other finding names the replicas
        return None
    text = (
        f"TTFT forms two separate groups: {groups.fast_requests:,} requests of about {duration(groups.fast_ttft_s)} "
        f"and {groups.slow_requests:,} of about {duration(groups.slow_ttft_s)}, mixed in time. Means and percentiles "
        "describe neither group. Probable causes: replicas of different speed behind the URL, or a cache that knew "
        "some of the prompts. Name each replica with its own --url."
    )
    return Finding("response-groups", "warning", text, "latencies")


def network_finding(summary: Summary) -> Finding | None:
    """Return a finding on the network between the client and the server, or None if there is nothing to report.

    The finding states the round-trip time unless it is negligible, and the gateways that name themselves. It is a
    warning if the network is a large part of TTFT.
    """
    network = summary.network
    if network is None:
        return None
    slow = network.rtt_p50_s is not None and network.rtt_p50_s >= RTT_SHOWN_S
    texts = []
    if slow:
        share = "" if network.ttft_share is None else f" ({percent(network.ttft_share)} of the median TTFT)"
        texts.append(
            f"TTFT includes the network: a round trip takes {duration(network.rtt_p50_s)}{share}, "
            f"p99 {duration(network.rtt_p99_s)}."
        )
    if network.gateways:
        texts.append(f"Responses came through {', '.join(network.gateways)}.")
    if not texts:
        return None
    large = slow and network.ttft_share is not None and network.ttft_share >= RTT_SHARE_MAX
    return Finding("network", "warning" if large else "note", " ".join(texts), "latencies")


def server_timing_finding(summary: Summary) -> Finding | None:
    """Return a finding on the times that the server states in its responses (--server-timing).

    Return None if the option is not set, or if no request is complete. The finding is a warning in three cases,
    otherwise a note:

    - The server states no times.
    - Many of the stated times are longer than the measured latency.
    - The load is not a burst, and much of the latency is spent outside the server's queue, prefill and inference.
    """
    timing = summary.server_timing
    if timing is None or not timing.complete:
        return None
    unknown_names = [source for source in timing.sources if "unknown" in source]
    if not timing.requests:
        backend = BACKENDS.get(summary.server.name or "")
        remedy = backend.request_times if backend is not None and backend.request_times else NO_TIMES
        stated = f" There is {join_or(unknown_names)}." if unknown_names else ""
        return Finding(
            "server-timing", "warning", f"No response states the server's times.{stated} {remedy}", "latencies"
        )
    sources = ", ".join(timing.sources)
    latency = timing.latency.upper()
    medians = ", ".join(_part_text(part) for part in timing.parts)
    text = (
        f"{latency} by the server's own times ({sources}), of {timing.requests:,} of "
        f"{pluralise(timing.complete, 'response')}: median {duration(timing.p50_s)}; {medians}."
    )
    level: Level = "note"
    if timing.longer >= LONGER_SHARE * timing.requests:
        level = "warning"
        text += (
            f" The stated times of {pluralise(timing.longer, 'response')} are longer than the measured {latency}, so "
            "they mean something else or the server's clock is wrong."
        )
    elif _much_is_outside(timing):
        level = "note" if summary.run.load.burst else "warning"
        text += (
            f" Much of {latency} is spent outside the server's queue and "
            f"{'prefill' if timing.latency == 'ttft' else 'inference'}: in a gateway, the HTTP server or the tokenizer."
        )
    return Finding("server-timing", level, text, "server_timing")


def _part_text(part: TimePart) -> str:
    return f"{part.name} unknown ({part.unknown})" if part.unknown else f"{part.name} {duration(part.p50_s)}"


def _much_is_outside(timing: ServerTiming) -> bool:
    """Return True if a large part of the latency was spent neither in the server's queue nor in prefill (or inference).

    `timing` divides the latency into parts. The part `remainder` is the time that belongs to no known part. The result
    is True if the remainder is large. It is False if a part other than the network is unknown, because the remainder
    then also contains the time of this part.
    """
    remainder = timing.part("remainder")
    if remainder is None or remainder.p50_s is None or not timing.p50_s or set(timing.unknown) - {"network"}:
        return False
    return remainder.p50_s >= OUTSIDE_MIN_S and remainder.p50_s >= OUTSIDE_SHARE * timing.p50_s


def _counted_by_chunks(summary: Summary) -> int:
    """Return the number of complete responses whose chunks were counted because their number of tokens is unknown."""
    return summary.tokens.counted_by.get("chunks", 0)


def client_sentence(summary: Summary) -> str:
    """Return a sentence that states whether the client was the limit, and how exact its timestamps are.

    A simulation in virtual time has no client, so the sentence states that the figures come from a model.
    """
    client = summary.client
    if summary.server.virtual:
        accuracy = summary.server.model_accuracy
        known = f" Accuracy of the model: {accuracy}." if accuracy else ""
        return f"Simulated: figures of a model. No server and no network took part.{known}"
    valid = f"Invalid: {_invalid_reason(client)}"
    if client.ok:
        valid = (
            "Valid: the client was not the limit" if summary.requests.complete else "Invalid: no request was complete"
        )
    error_s = client.error_bar_e2e_s
    error = f"error ±{duration(error_s, 2)}" if error_s is not None else "error unknown"
    clauses = [valid, f"{client.source.title}, {error}"]
    requests = pluralise(summary.requests.sent, "request")
    if client.ring_rejected:
        which = "" if client.ring_given_up else " for those"
        clauses.append(
            f"packet timestamps and socket timestamps disagreed in {client.ring_rejected:,} of {requests}: "
            f"socket timestamps used{which}"
        )
    if client.socket_rejected:
        clauses.append(
            f"kernel timestamps contradicted {client.socket_rejected:,} of {requests}: "
            "user-space timestamps used for those"
        )
    if client.ring_drops:
        clauses.append(f"the packet ring lost {pluralise(client.ring_drops, 'segment')}")
    if client.ring_missed:
        missed = pluralise(client.ring_missed, "timestamp")
        clauses.append(f"{missed} missing in the packet ring: socket timestamps used for those")
    if client.lacking:
        clauses.append(client.lacking)
    calibration = client.calibration
    if calibration:
        rate = f", {calibration.events_per_s:,.0f} events/s" if calibration.events_per_s else ""
        error = f"TTFT ±{duration(calibration.ttft_p99_s, 2)} at p99"
        clauses.append(f"calibrated {calibration.made_at[:10]}: {error}{rate}")
    return f"{'; '.join(clauses)}."


def client_level(summary: Summary) -> Level:
    """Return the level of the finding whose text is `client_sentence`.

    The level is `error` if the client was the limit, or if no request was complete. The level is `warning` if a less
    exact timestamp source had to be used. The level is `note` for a simulation in virtual time, because no client took
    part. Otherwise the level is `ok`."""
    client = summary.client
    if not (client.ok and summary.requests.complete):
        return "error"
    if summary.server.virtual:
        return "note"
    return "warning" if client.ring_given_up or client.socket_rejected else "ok"


def _invalid_reason(client: ClientHealth) -> str:
    """Return the reason why the figures of a run are invalid.

    Disagreeing timestamps are a reason only in runs that an older version of loadgen recorded."""
    if client.reasons and all(reason.startswith(RING_OFF) for reason in client.reasons):
        return "packet timestamps and socket timestamps disagree"
    if client.client_limit:
        return "this machine could not send every request"
    return "the client was the limit"


def priority(client: ClientHealth) -> Finding | None:
    """Return a finding on the client's scheduling priority, or None if there is nothing to report.

    There is a finding in each of these cases:

    - The priority was raised.
    - A worker gave up real-time priority.
    - The user requested real-time priority, but the system did not permit it.

    Without such a request, a failure to raise the priority is only reported in `client.reasons`, and only if the client
    was too slow.
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


def _error_bars(client: ClientHealth, summary: Summary) -> list[Finding]:
    """Return a finding on the timestamp errors of TTFT, TPOT and ITL, if coalesced reads increase these errors.

    A coalesced read returns several tokens, which share one timestamp. The times between these tokens are therefore
    inexact. The list is empty if coalesced reads do not increase the errors.
    """
    e2e_error_s = client.error_bar_e2e_s
    if e2e_error_s is None:
        return []
    if (client.error_bar_ttft_s or 0) <= e2e_error_s and (client.error_bar_itl_s or 0) <= 2 * e2e_error_s:
        return []
    error_bars = {name: getattr(client, f"error_bar_{name}") for name in ("ttft_s", "tpot_s", "itl_s")}
    texts, wide = [], []
    for name, error_s in error_bars.items():
        if error_s is None:
            continue
        title, median_s = METRICS[name].short, summary.latencies[name].p50
        texts.append(f"{title} ±{duration(error_s, 2)}")
        if median_s and error_s > ERROR_MAX * median_s:
            wide.append(f"{title} uncertain by {percent(error_s / median_s)}")
    text = f"Worst-case error from coalesced reads: {', '.join(texts)}"
    if wide:
        text += f"; {', '.join(wide)} of the median (limit {ERROR_MAX * 100:.0f}%)"
    return [Finding("error", "warning" if wide else "ok", f"{text}.", "client")]


def delivery_sentence(summary: Summary) -> str:
    """Return a sentence that compares the actual load with the requested load.

    Return an empty string if no request was due."""
    delivery = summary.delivery
    if not delivery.asked:
        return ""
    noun, verb = ("session", "begun") if summary.run.load.sessions else ("request", "sent")
    parts = [f"{delivery.sent:,} of {pluralise(delivery.asked, noun)} {verb}"]
    rate, variation = delivery.rate_per_s, delivery.cv
    if rate.named is not None and rate.sent is not None:
        parts.append(f"{significant(rate.sent, 4)} /s (target {significant(rate.named, 4)})")
    if variation.named and variation.sent is not None:
        parts.append(f"inter-arrival CV {significant(variation.sent)} (target {significant(variation.named)})")
    check = delivery.ks.sent
    if check is not None:
        fit = "distribution as requested" if check.p_value >= P_VALUE_MIN else "distribution not as requested"
        parts.append(f"{fit} (Kolmogorov-Smirnov p = {significant(check.p_value, 2)})")
    if delivery.late_s is not None and not summary.server.virtual:  # in virtual time, no request is sent late
        parts.append(f"p99 dispatch delay {duration(delivery.late_s.p99)}")
    return f"{', '.join(parts)}.{_queue_wait_sentence(delivery)}"


def untested_distribution(summary: Summary) -> str:
    """Return a sentence that states why the distribution of the arrivals was not tested.

    Return an empty string if the distribution was tested, or if there is none to test."""
    delivery = summary.delivery
    if delivery.ks.due is None or delivery.ks.sent is not None or delivery.queue_wait is not None:
        return ""
    delays = f" of {duration(delivery.late_s.p99)}" if delivery.late_s is not None else ""
    return f"Arrival distribution not tested: dispatch delays{delays} are too long."


def _queue_wait_sentence(delivery: Delivery) -> str:
    """Return a sentence about requests that waited because of `--concurrency`, or an empty string if none waited."""
    wait = delivery.queue_wait
    if wait is None:
        return ""
    return (
        f" {pluralise(wait.requests, 'request')} waited because of --concurrency: p50 {duration(wait.p50)}, p99 "
        f"{duration(wait.p99)}. TTFT counts from sending, ttft_due from the due time."
    )


def capped_rate_sentence(summary: Summary) -> str:
    """Return a sentence that says that `--concurrency` limited the request rate, and by how much.

    Return an empty string if requests were sent at nearly the target rate.
    """
    rate = summary.delivery.rate_per_s
    if summary.delivery.queue_wait is None or rate.due is None or rate.sent is None:
        return ""
    if rate.sent >= CAPPED_SHARE * rate.due:
        return ""
    target = significant(rate.due if rate.named is None else rate.named, 3)
    return f"--concurrency limited the rate to {significant(rate.sent, 3)} of {target} requests per second."


def delivered_as_requested(summary: Summary) -> bool:
    """Return True if every request was sent, and the due times and the send times fit the requested arrival process."""
    checks = (summary.delivery.ks.due, summary.delivery.ks.sent)
    return not summary.delivery.not_sent and all(check is None or check.p_value >= P_VALUE_MIN for check in checks)


def goodput_sentences(summary: Summary) -> list[str]:
    """Return two sentences: how many requests met the latency bounds, and which bounds 90% of requests would have met.

    Return an empty list if the run has no bounds.
    """
    result = summary.goodput
    if not result or not result.requests:
        return []
    low, high = (significant(end * 100, 3) for end in result.attainment_ci95)
    due = "" if summary.window.whole else " due in the window"
    good = f"{result.good:,} of {pluralise(result.requests, 'request')}{due} met {' and '.join(result.bounds)}"
    text = f"Goodput {significant(result.per_s)} requests/s: {good}"
    interval = confidence_interval(low, high)
    text += f" ({percent(result.attainment)}{f', {interval}%' if interval else ''})."
    met = result.met_by["90%"]
    if not met:
        return [text, "No bounds would have been met by 90%: too many were not complete."]
    bounds = bound_texts(met, " < ")
    if not bounds:
        names = " and ".join(met.bounds_s)
        return [text, f"90% would have met any bounds, however tight: their {names} is 0 or undefined."]
    scale = f" (bounds x{significant(met.scale)})" if met.scale else ""
    return [text, f"90% would have met {' and '.join(bounds)}{scale}."]


def bound_texts(met: BoundsMet, sign: str) -> list[str]:
    """Return each bound in `met` as a text, for example `ttft < 300 ms`. `sign` is the part between name and value.

    The bounds in `met` are those of --goodput, multiplied by a factor. The factor is chosen so that a given share of
    the requests, such as 90%, meets the multiplied bounds. It can be 0, for example if only reasoning tokens have a
    bound and 90% of the requests have no reasoning tokens. A multiplied bound of 0 is left out.
    """
    texts = []
    for name, bound in met.bounds_s.items():
        factor, unit = unit_of(name, bound)
        if bound > 0:
            texts.append(f"{name}{sign}{significant(bound * factor)} {unit}")
    return texts


def _window(summary: Summary) -> list[Finding]:
    """Return findings on the measurement window, on requests outside the window, and on a missing steady state."""
    window = summary.window
    if window.unsteady:
        if window.overloaded:
            text = (
                f"Server overloaded: {window.unsteady}. Requests arrived faster than they completed, so latencies "
                "depend on the length of the run."
            )
            return [Finding(OVERLOADED, "warning", text, "course")]
        text = f"No steady state: {window.unsteady}, so latencies depend on the length of the run."
        return [Finding("window", "warning", text, "course")]
    if window.whole:
        return []
    ends = f"{significant(window.from_s)} s to {significant(window.to_s)} s"
    text = f"Measured from {ends} of the run ({window.reason}): {pluralise(window.requests, 'request')} due within."
    result = [Finding("window", "ok", text, "course")]
    if window_is_empty(summary):
        text = f"No complete request was due in the window, {ends} of the run: there are no latencies."
        result = [Finding("window", "warning", text, "course")]
    left_out = window.outside
    if left_out:
        doubtful = left_out.slower or left_out.incomplete
        text = outside_window_sentence(window.requests + left_out.requests, left_out)
        result.append(Finding("outside", "warning" if doubtful else "ok", text, "course"))
    return result


def window_is_empty(summary: Summary) -> bool:
    """Return True if requests completed but none of them was due in the measurement window."""
    return bool(summary.requests.complete) and not summary.window.whole and not summary.latencies["e2e_s"].n


def outside_window_sentence(total: int, left_out: OutsideWindow) -> str:
    """Return a sentence on the requests outside the measurement window.

    The sentence states their number, their outcomes, and the latency of the slowest one. `total` is the number of all
    requests.
    """
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
    """Return a sentence if the measured concurrency contradicts Little's law, otherwise an empty string.

    Little's law is `concurrency = throughput * mean latency`. A sentence is also returned if incomplete requests, which
    have no latency, are a large part of the concurrency.
    """
    law, mean_s = summary.littles_law, summary.latencies["e2e_s"].mean
    if law is None or (law.holds and law.covers):
        return ""
    product = f"{significant(summary.throughput.requests_per_s)} requests/s x {duration(mean_s)} mean E2E"
    product += f" = {significant(law.expected)} in flight by Little's law"
    measured = f"{significant(law.in_flight)} measured"
    if law.holds:
        incomplete = f"{significant(law.incomplete)} of them in requests that did not complete"
        return f"Latencies exclude much of the load on the server: {product}, {measured}, {incomplete}."
    tolerance = f"tolerance ±{significant(law.tolerance, 2)}"
    return f"Throughput and latencies contradict each other: {product}, {measured} ({tolerance})."


def hardware_limit_bars(limit: HardwareLimit, run: int | None = None) -> Bullets:
    """Return bars that show throughput, mean TPOT and mean TTFT as shares of the hardware limit.

    For a latency, the share is the minimum that the hardware allows, divided by the measured mean. The text of the bar
    contains both. `run` is the index of the run on a page of several runs.
    """
    bullets = []
    if limit.throughput_share is not None:
        rate = f"{significant(limit.output_tokens_per_s, 4)} tokens/s"
        text = f"{percent(limit.throughput_share)} of {rate}, bound by {limit.bound}"
        bullets.append(Bullet("Output throughput", limit.throughput_share, text))
    for label, ratio, minimum_s, cause in (
        ("Mean TPOT", limit.tpot_ratio, limit.tpot_s, ""),
        ("Mean TTFT", limit.ttft_ratio, limit.ttft_s, " for one prompt"),
    ):
        if ratio and minimum_s is not None:
            text = f"{percent(1 / ratio)}: minimum {duration(minimum_s)}{cause}, measured {duration(minimum_s * ratio)}"
            bullets.append(Bullet(label, 1 / ratio, text))
    hardware = f"{limit.gpus} x {limit.gpu}, {limit.model}, {limit.format}"
    return Bullets(f"Share of the hardware limit{times_speed(limit.speed)} ({hardware})", bullets, run)


def hardware_limit_sentence(limit: HardwareLimit) -> str:
    """Return sentences that compare throughput, TPOT and TTFT with the limits of the server's hardware."""
    rate, gpus = significant(limit.output_tokens_per_s, 4), f"{limit.gpus} x {limit.gpu}"
    text = f"Hardware limit{times_speed(limit.speed)} ({gpus}, {limit.model}, {limit.format}): "
    text += f"{percent(limit.throughput_share)} of {rate} tokens/s, bound by {limit.bound}."
    return f"{text} {hardware_limit_details(limit)}"


def hardware_limit_details(limit: HardwareLimit) -> str:
    """Return a text that compares the mean TPOT and the mean TTFT of a run with the limits of the hardware.

    The text also states:

    - MBU, the used share of the memory bandwidth.
    - MFU, the used share of the peak FLOP/s.
    - The share of a decode step that the inference framework needs in addition to the computation.

    If the run was faster than a limit, the text says that the server probably has other or more GPUs.
    """
    text = ""
    if limit.tpot_ratio is not None:
        text += f"Mean TPOT is {significant(limit.tpot_ratio, 2)} times the {limit.tpot_bound} limit"
        text += f" of {duration(limit.tpot_s)}."
    if limit.ttft_ratio is not None:
        text += f" Mean TTFT is {significant(limit.ttft_ratio, 2)} times the limit of {duration(limit.ttft_s)}"
        text += " for a single prompt."
    used = [f"{name} {percent(part)}" for name, part in (("MBU", limit.mbu), ("MFU", limit.mfu)) if part is not None]
    text += f" {', '.join(used)}; with {significant(limit.decoding, 2)} requests decoding, "
    text += f"{percent(limit.overhead_share)} of a step is overhead ({limit.framework}, measured elsewhere)."
    if limit.exceeds_limit:
        text += " No GPU is faster than its limit: the server probably has other or more GPUs."
        text += " Name them with --gpu-model."
    return text.lstrip()


def memory_sentences(summary: Summary) -> list[str]:
    """Return sentences on the memory use of the KV cache, the GPUs and the server's processes.

    Return an empty list if memory was not measured.
    """
    result = summary.memory
    if not result:
        return []
    lines = []
    cache = result.kv_cache
    if cache and cache.peak_share is not None:
        capacity = f" of {cache.tokens:,} tokens" if cache.tokens else ""
        peak = f"peak {percent(cache.peak_share)}"
        if cache.peak_fullest_share is not None:
            capacity += f" in {cache.engines} engines"
            peak += f" on average and {percent(cache.peak_fullest_share)} in the fullest"
        source = "in the model" if summary.server.virtual else "as reported by the server"
        lines.append(f"KV cache{capacity}: {peak}, {source}.")
    lines += [_memory_sentence(gpu) for gpu in result.gpus[:GPUS_NAMED] if gpu.peak_bytes is not None]
    unnamed = len(result.gpus) - GPUS_NAMED
    if unnamed > 0:
        lines.append(f"{pluralise(unnamed, 'more GPU')} in summary.json.")
    if result.taken_at_start and lines:
        lines.append(f"{result.taken_at_start.note}.")
    for process in result.processes:
        if process.on == "host" and process.peak_bytes is not None:
            lines.append(_memory_sentence(process))
    return lines


def _memory_sentence(levels: MemoryLevels) -> str:
    name, total_bytes = getattr(levels, "name", ""), getattr(levels, "total_bytes", None)
    subject = f"{levels.of[0].upper()}{levels.of[1:]}"
    if name:
        subject += f" ({name})"
    before = f"{byte_size(levels.idle_bytes)} before the first request, " if levels.idle_bytes is not None else ""
    total = f" of {byte_size(total_bytes)}" if total_bytes else ""
    return f"{subject}: {before}peak {byte_size(levels.peak_bytes)}{total}."


def _counters(summary: Summary) -> list[Finding]:
    """Return findings that compare the server's counters with the client's counters."""
    known = summary.server_counters
    counters = [(title, known[name]) for name, title in COUNTED.items() if known.get(name)]
    result = []
    equal = [title for title, counter in counters if counter.agree and (title != "rejections" or counter.server)]
    if equal:
        warmup = summary.requests.warmup
        included = f", {pluralise(warmup, 'warm-up request')} included" if warmup else ""
        listed = " and ".join(filter(None, (", ".join(equal[:-1]), equal[-1])))
        result.append(Finding("counters", "ok", f"The server counted the same {listed}{included}.", "machines"))
    for title, counter in counters:
        if counter.agree is False:
            client = f"{counter.client:,}"
            if counter.client_most is not None:
                client += f" to {counter.client_most:,}"
            text = f"The server counted {counter.server:,} {title}, the client {client}: {counter.why}."
            result.append(Finding("counters", "warning", text, "machines"))
    return result


def _warnings(summary: Summary) -> list[Finding]:
    """Return one warning for each special condition of the run, such as an interruption or damaged lines."""
    run, client = summary.run, summary.client
    requests = summary.requests
    warmup = f"{requests.warmup_incomplete:,} of {pluralise(requests.warmup, 'warm-up request')} did not complete."
    proxy = f"docker-proxy forwards every byte from {summary.server.url}, and its delay is in every latency."
    proxy += f' Measure {summary.server.proxied_to}, or set "userland-proxy": false for the Docker engine.'
    if run.going_on:
        partial = "The run is still going on: figures cover what is recorded so far."
        partial += " `loadgen report` computes them again."
    else:
        partial = "Interrupted: figures cover the part that was recorded."
    damaged = f"{pluralise(run.damaged_lines, 'damaged line')} of the run file left out."
    merged = f"{client.first_token_merged:,} of {requests.sent:,} first tokens coalesced with later ones:"
    merged += " TTFT is an upper bound."
    reopened = f"{pluralise(client.reopened, 'connection')} closed by the server and reopened."
    again = f"{pluralise(client.sent_again, 'request')} sent again, because the server closed idle connections just"
    again += " then. TTFT counts from the second send; latency from the due time includes both."
    paused = (
        f"The closed loop paused {pluralise(client.pauses or 0, 'time')}, for {duration(client.paused_s)} of client"
    )
    paused += " time in total, because requests failed or were rejected at once (no connection, overload, status 5xx)."
    removed = "" if summary.removed is None else _removed_text(summary.removed)
    candidates = [
        ("removed", summary.removed, removed, ""),
        ("warmup", requests.warmup_incomplete, warmup, "failures"),
        *(("bottleneck", True, f"{reason[0].upper()}{reason[1:]}.", "client") for reason in client.reasons),
        ("proxy", summary.server.proxied_to, proxy, "client"),
        ("forced", run.forced, f"Measured with --force: {run.forced}.", ""),
        ("interrupted", run.interrupted, partial, ""),
        ("damaged", run.damaged_lines, damaged, ""),
        ("coalesced", client.first_token_merged, merged, "client"),
        ("reopened", client.reopened, reopened, "client"),
        ("sent-again", client.sent_again, again, "client"),
        ("pauses", client.pauses, paused, "client"),
        *(("note", True, f"{note}.", "") for note in run.notes),
    ]
    return [Finding(name, "warning", text, anchor) for name, applies, text, anchor in candidates if applies]


def _removed_text(removed: RemovedPart) -> str:
    """Return a text on requests whose Records were removed during the run, as --keep-records requires.

    The text states the number of these requests, and where figures of them remain.
    """
    text = f"{pluralise(removed.requests, 'request')} ({removed.complete:,} complete) that ended in the first"
    text += f" {duration(removed.until_s)} are in no figure, because --keep-records removed their records. Figures of"
    return f"{text} {pluralise(len(removed.windows), 'time window')} remain in summary.json (removed)."


def measured_text(entry: ObjectiveVerdict) -> str:
    """Return the measured value of an objective as text.

    The text includes the number of incomplete requests that the value does not cover.
    """
    left_out = f"; {pluralise(entry.left_out, 'request')} not complete and left out" if entry.left_out else ""
    return f"{entry.said}{left_out}"


def objectives_finding(summary: Summary) -> Finding | None:
    """Return a finding on how many objectives passed, failed or are inconclusive, or None if the run has no objectives.

    Its level is that of the worst objective: an error for a failed objective, a warning for an inconclusive objective.
    """
    words = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive"}
    counts = Counter[str](objective.verdict for objective in summary.objectives)
    marginal = Counter[str](objective.verdict for objective in summary.objectives if objective.marginal)
    parts = []
    for name, word in words.items():
        mark = f" ({marginal[name]} marginal)" if marginal[name] and name != "inconclusive" else ""
        if counts[name]:
            parts.append(f"{counts[name]} {word}{mark}")
    text = ", ".join(parts)
    if not text:
        return None
    level: Level = "ok"
    if counts["fail"]:
        level = "error"
    elif counts["inconclusive"]:
        level = "warning"
    return Finding("objectives", level, f"{text}.", "objectives")
