"""Builds the summary of a run: workload, server, request outcomes, metrics and delivered load.

`loadgen.analysis.summary` documents each field. The field `delivery` of the summary answers two questions:

- Does the planned load match the requested arrival process? The rate and the variation of the due times, at which the
  plan sends the requests, are compared with those of the process.
- Did the client send the requests on time? The send times are compared with the due times.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import msgspec
import numpy as np

from loadgen.analysis import client_health, littles_law, stats, summary
from loadgen.analysis.cached_prompts import MARK as CACHED
from loadgen.analysis.cached_prompts import find_cached_prompts
from loadgen.analysis.canaries import compare_canaries
from loadgen.analysis.checked_texts import find_expected_texts, find_suspect_texts
from loadgen.analysis.frame import Booleans, Frame, sum_known
from loadgen.analysis.frame_parts import frame_parts
from loadgen.analysis.hardware_limit import limit_of
from loadgen.analysis.held_back import find_held_back
from loadgen.analysis.itl_distribution import (
    Distributions,
    GapFigures,
    describe_metrics,
    describe_sorted_metrics,
    start_gap_figures,
    with_gap_metrics,
)
from loadgen.analysis.metrics import METRICS, Metric
from loadgen.analysis.network_path import describe_path
from loadgen.analysis.prediction import read_prediction
from loadgen.analysis.reasoning import find_answered, reasoning_tokens, unanswered
from loadgen.analysis.replicas import compare_replicas
from loadgen.analysis.request_outcomes import count_outcomes, request_counts
from loadgen.analysis.response_groups import find_groups
from loadgen.analysis.run.removed_records import RemovedWindow
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.run.token_counts import BASES
from loadgen.analysis.run_course import describe_course
from loadgen.analysis.server_timing import find_server_timing
from loadgen.analysis.session_graphs import session_figures
from loadgen.analysis.speculation import find_speculation, tokens_per_event
from loadgen.analysis.steady_window import WHOLE_RUN, frame_of_run, outside_window
from loadgen.analysis.telemetry import (
    abandoned_requests,
    check_counters,
    count_mixed_replicas,
    counted_canaries,
    gauge_values,
    machine_clock,
    memory_use,
    skew_range_s,
)
from loadgen.analysis.valid_outputs import find_valid_outputs

MAX_TURNS = 1000
"""Maximum number of turns in a session. Workloads cannot have more, and higher turn numbers in a run file are
ignored."""
PLAN_FIELDS = ("n", "workload", "input_tokens", "output_tokens", "seed", "workers", "timeout_s")
CLASS_FIELDS = ("n", "workload", "input_tokens", "output_tokens")
IN_FLIGHT = "Requests in flight at the same time share the server's steps, so they are not fully independent."
ONE_BURST = "Requests of one burst are not independent: they wait in one queue and share the server's steps."
INTERVALS = (
    "An interval shows how exactly the figure of this run is known. How much another run may differ is only known from "
    "repeats (--repeats)."
)


def summarise(
    run: Run, frame: Frame | None = None, gap_figures: Callable[[], GapFigures] | None = None
) -> summary.Summary:
    """Return the summary of a run.

    - `frame`: the data of the run's requests as arrays. By default, it is computed from `run.records`. The caller must
      pass it if `run` has no Records, for example if `run` comes from `loadgen.analysis.steady_window.load_run`.
    - `gap_figures`: the function of `start_gap_figures` for this run, if the caller has started this process.

    Latencies cover complete requests only. The field `latency_adjusted` also covers the incomplete requests and counts
    each as infinitely slow.
    """
    if frame is None:
        frame = frame_of_run(run)
    metrics = latency_metrics()
    with nullcontext(gap_figures) if gap_figures else start_gap_figures(metrics, frame) as figures_of_gaps:
        # A second process describes the gaps of a large run, while this process computes all other figures.
        latencies = describe_sorted_metrics(metrics, frame)
        result = _summarise(run, frame, latencies)
        result.latencies = with_gap_metrics(latencies, metrics, frame, figures_of_gaps)
    return result


def _summarise(run: Run, frame: Frame, latencies: Distributions) -> summary.Summary:
    """Return the summary of a run.

    `latencies` need not contain the distributions of gaps, because no other figure depends on them.
    """
    info = run_info(run, frame)
    missing = int((frame.inside & ~frame.complete).sum())
    first_turns = frame.measured & (frame.turn == 0)  # Later turns follow responses, so they have no due times.
    delivery = stats.check_delivery(
        frame.due_ns[first_turns],
        frame.first_sent_ns[first_turns],
        info.arrivals,
        info.load,
        released_ns=frame.released_ns[first_turns],
    )
    latencies_adjusted = {
        metric.name: stats.describe_adjusted(metric.values(frame), missing)
        for metric in latency_metrics()
        if metric.adjusted
    }
    held_back = find_held_back(frame)
    counters = check_counters(run, frame)
    requests = request_counts(run, frame)
    health = client_health.health(run, frame, latencies)
    machines = [machine_clock(run, frame, facts) for facts in run.header.client.get("machines", ())]
    skew_s = _figure(METRICS["skew_s"], frame)
    throughput = _throughput(frame, health)
    model_parts = sorted(frame_parts(frame, frame.models), key=lambda part: part[0])
    return summary.Summary(
        run=info,
        server=server_info(run),
        requests=requests,
        tokens=token_counts(run, frame, may_end=info.may_end),
        window=_measured_window(frame),
        throughput=throughput,
        littles_law=littles_law.check(frame),
        latencies=latencies,
        intervals=summary.IntervalMeaning(
            confidence=stats.CONFIDENCE,
            independent=False,
            note=f"{ONE_BURST if info.load.burst else IN_FLIGHT} {INTERVALS}",
        ),
        latencies_adjusted=latencies_adjusted,
        burst=summary.BurstSkew(
            skew_s=skew_s, skew_range_s=skew_range_s(machines, frame) if machines and skew_s is not None else None
        ),
        delivery=delivery,
        memory=memory_use(run),
        server_counters=counters,
        abandoned=abandoned_requests(run, requests.abandoned),
        client=health,
        machines=machines,
        turns=_turns(frame, _rows_in_sessions(run, frame)),
        sessions=session_figures(frame),
        traffic=_traffic(run, frame, health),
        models=[summary.PartFigures(**part_figures(name, part, health)) for name, part in model_parts],
        replicas=[
            summary.PartFigures(**part_figures(name, part, health))
            for name, part in sorted(frame_parts(frame, frame.replicas), key=lambda part: part[0])
        ],
        replica_difference=compare_replicas(frame),
        mixed_replicas=count_mixed_replicas(run),
        held_back=held_back,
        speculation=find_speculation(
            frame,
            counters,
            partial(gauge_values, run),
            counts_prefill=bool(run.header.server_notes.get("counts_prefill_steps")),
        ),
        tokens_per_event=tokens_per_event(frame),
        outputs=find_valid_outputs(frame, stats.share_interval),
        answered=find_answered(frame, stats.share_interval),
        cached_prompts=find_cached_prompts(run, frame, counters, counted_canaries(run)),
        network=describe_path(run, frame, latencies["ttft_s"]),
        server_timing=find_server_timing(run, frame),
        response_groups=find_groups(run, frame),
        course=describe_course(run, frame),
        removed=removed_part(run),
        canaries=compare_canaries(run.canaries, frame, stats.wilson_interval),
        expected_texts=find_expected_texts(frame, stats.wilson_interval),
        suspect_texts=find_suspect_texts(frame),
        limit=limit_of(run, frame, latencies, throughput.output_tokens_per_s),
        prediction=read_prediction(run.header.server),
    )


def _traffic(run: Run, frame: Frame, health: summary.ClientHealth) -> list[summary.TrafficFigures]:
    """Return the figures of each class of traffic with measured requests. The list is empty for a run
    without classes.
    """
    result = []
    parts = dict(frame_parts(frame, frame.classes))
    for facts in run.header.traffic:
        part = parts.get(facts.name)
        if part is None:
            continue
        first_turns = part.measured & (part.turn == 0)
        delivery = stats.check_delivery(
            part.due_ns[first_turns],
            part.first_sent_ns[first_turns],
            facts.load.text,
            facts.load,
            released_ns=part.released_ns[first_turns],
        )
        result.append(
            summary.TrafficFigures(
                **part_figures(facts.name, part, health),
                load=facts.load,
                workload=facts.workload,
                input_length=facts.input_tokens,
                output_length=facts.output_tokens,
                endpoint=facts.endpoint,
                model=facts.model,
                delivery=delivery,
            )
        )
    return result


def part_figures(name: str, part: Frame, health: summary.ClientHealth) -> dict[str, Any]:
    """Return the fields of PartFigures for a part of a run, such as a class of traffic or a model.

    `name` is the name of the part, and `part` is the Frame with its requests (loadgen.analysis.frame_parts).
    """
    tried = part.measured & ~part.dropped
    return {
        "name": name,
        "requests": count_outcomes(part),
        "prompt_tokens": sum_known(part.prompt_reported, tried),
        "output_tokens": sum_known(part.output_reported, tried),
        "throughput": _throughput(part, health),
        "latencies": describe_metrics(latency_metrics(), part),
        "outputs": find_valid_outputs(part, stats.share_interval),
        "answered": find_answered(part, stats.share_interval),
        "skew_s": _figure(METRICS["skew_s"], part),
    }


def latency_metrics() -> list[Metric]:
    """Return the metrics that describe single requests, chunks or tokens."""
    return [metric for metric in METRICS.values() if metric.per != "run"]


def _measured_window(frame: Frame) -> summary.MeasuredWindow:
    span, window = frame.span_ns, frame.window
    return summary.MeasuredWindow(
        from_s=None if span is None else stats.round_to_ns(span[0] / 1e9),
        to_s=None if span is None else stats.round_to_ns(span[1] / 1e9),
        chosen="whole" if window is None else window.chosen,
        reason=WHOLE_RUN if window is None else window.reason,
        requests=int(frame.inside.sum()),
        unsteady="" if window is None else window.unsteady,
        overloaded=window is not None and window.overloaded,
        outside=outside_window(frame),
    )


def run_info(run: Run, frame: Frame) -> summary.RunInfo:
    """Return the `run` part of the summary: the run's identity, its plan, and the command that repeats the run."""
    header, footer = run.header, run.footer
    plan = header.plan
    folder = run.path.resolve().parent.name
    last_ns = int(np.nanmax(frame.end_ns, initial=0))
    if footer is None:  # The run was interrupted or is still running: use the last recorded instant.
        ended_ns = max([last_ns, *(sample.at_ns for sample in run.telemetry)])
    else:  # The footer's instant is up to a second late, because workers decode and write after the last response.
        ended_ns = last_ns or footer.ended_ns
    return summary.RunInfo(
        id=folder,
        label=plan.get("label") or folder,
        started_at=header.started_at,
        duration_s=round(ended_ns / 1e9, stats.DECIMALS),
        arrivals="traffic" if header.traffic else plan.get("arrivals", "burst"),
        load=header.load,
        asked_s=plan.get("duration_s"),
        # Each class of traffic has its own workload and lengths.
        **{name: None if header.traffic and name in CLASS_FIELDS else plan.get(name) for name in PLAN_FIELDS},
        seed_choice=plan.get("seed_choice", ""),
        audio_seconds=plan.get("audio_seconds"),
        has_audio=frame.has_audio,
        cold=str(header.client.get("cold", "")),
        batch_size=plan.get("batch_size", 1),
        ignore_eos=plan.get("ignore_eos", True),
        interrupted=footer is None or footer.interrupted,
        going_on=run.going_on,
        damaged_lines=run.damaged_lines,
        notes=[] if footer is None else footer.notes,
        command=shlex.join(header.command),
        version=header.version,
        prompts=header.client.get("prompts"),
        prompts_exact=header.client.get("exact", True),
        forced=header.client.get("forced"),
        over_limit=header.client.get("over_limit"),
        repeat=plan.get("repeat", 0),
        repeats=plan.get("repeats", 1),
    )


def removed_part(run: Run) -> summary.RemovedPart | None:
    """Return figures of the requests whose Records were removed during the run, or None if there are none."""
    windows = [(part.worker, window) for part in run.removed for window in part.windows]
    windows.sort(key=lambda item: item[1].from_ns)
    if not windows:
        return None
    return summary.RemovedPart(
        requests=sum(part.requests for part in run.removed),
        complete=sum(part.states.get("complete", 0) for part in run.removed),
        until_s=max(window.to_ns for _worker, window in windows) / 1e9,
        windows=[_removed_figures(worker, window) for worker, window in windows],
    )


def _removed_figures(worker: int, window: RemovedWindow) -> summary.RemovedFigures:
    values: dict[str, Any] = {
        f"{name.removesuffix('_ns')}_s": None if value is None else value / 1e9
        for name, value in msgspec.structs.asdict(window).items()
        if name.endswith("_ns")
    }
    return summary.RemovedFigures(
        worker=worker,
        requests=window.requests,
        complete=window.complete,
        output_tokens=window.output_tokens,
        **values,
    )


def server_info(run: Run) -> summary.ServerInfo:
    """Return the `server` part of the summary. Facts that the probe did not detect come from the plan."""
    server, plan = run.header.server, run.header.plan
    return summary.ServerInfo(
        name=server.get("name") or plan.get("server"),
        version=server.get("version"),
        model=plan["model"] if "=" in (plan.get("model") or "") else server.get("model"),
        platform=plan.get("platform") or _modelled_hardware(server.get("hardware") or {}),
        url=server.get("url") or plan.get("url"),
        proxied_to=server.get("proxied_to") or "",
        proxy=server.get("proxy") or "",
        protocol=server.get("protocol") or "",
        addresses=server.get("addresses") or [],
        addresses_unused=server.get("addresses_unused") or {},
        replicas={replica.get("url", ""): replica.get("addresses") or [] for replica in server.get("replicas") or ()},
        endpoint=server.get("endpoint") or plan.get("endpoint"),
        simulated=bool(server.get("simulated", False)),
        speed=server.get("speed"),
        virtual=bool(server.get("virtual", False)),
        model_accuracy=str((server.get("hardware") or {}).get("accuracy") or ""),
        limits=server.get("limits") or {},
    )


def _modelled_hardware(hardware: Mapping[str, Any]) -> str:
    """Return the GPUs that a simulated server models, such as `4 x H100 SXM`.

    `hardware` is the server's description of the modelled hardware. Return an empty string if `hardware` names no GPU.
    """
    gpu, gpus = hardware.get("gpu", ""), hardware.get("gpus", hardware.get("tensor_parallel", 1))
    return gpu if gpus == 1 or not gpu else f"{gpus} x {gpu}"


def token_counts(run: Run, frame: Frame, *, may_end: bool) -> summary.TokenCounts:
    """Return the numbers of tokens that the client requested and that the server reported, over all requests sent.

    The result also contains the number of complete requests with a wrong output length: the server reported another
    length than the client requested. If `may_end` is True, responses may end early, so a response that is too short is
    not counted as wrong.
    """
    # NaN (an unknown length) is neither longer nor shorter. Some requests state no length, which is stored as 0.
    requested = np.where(frame.output_asked > 0, frame.output_asked, np.nan)
    difference = frame.output_reported - requested
    tried = frame.measured & ~frame.dropped
    complete = frame.measured & frame.complete
    early, longer = complete & (difference < 0), complete & (difference > 0)
    counted_by = Counter[str]()
    for source, requests in frame.sources.items():
        if source.measured and source.state == "complete":
            counted_by[source.counted_by or "nobody"] += requests
    spread = complete & frame.has_basis("spread")
    contradicted = complete & frame.has_basis("contradicted")
    without_text = complete & frame.has_basis("without_text")
    unstreamed = np.where(complete & ~contradicted, frame.unstreamed_tokens, 0.0)
    chunks = int(frame.chunk_counts[spread].sum())
    reasoning = np.where(complete, reasoning_tokens(frame), 0.0)
    per_basis = np.bincount(frame.basis[complete & (frame.chunk_counts > 0)], minlength=len(BASES))
    return summary.TokenCounts(
        prompt_asked=sum_known(frame.prompt_asked, tried),
        prompt_reported=sum_known(frame.prompt_reported, tried),
        output_asked=sum_known(frame.output_asked, tried),
        output_reported=sum_known(frame.output_reported, tried),
        prompt_mismatches=int((np.abs(frame.prompt_reported - frame.prompt_asked)[complete] > 0).sum()),
        output_mismatches=int((longer if may_end else early | longer).sum()),
        output_early=_length_difference(frame, early, "" if may_end else _why_early(run, frame, early)),
        output_longer=_length_difference(frame, longer, _why_longer(run, frame, longer)),
        prompt_unknown=int((np.isnan(frame.prompt_asked) & complete).sum()),
        truncated=_truncated_inputs(run, frame),
        prompt_unreported=int(np.isnan(frame.prompt_reported[complete]).sum()),
        counted_by=dict(counted_by),
        streamed_by={basis: int(count) for basis, count in zip(BASES, per_basis, strict=True) if count},
        unstreamed=int(unstreamed.sum()),
        unstreamed_requests=int((unstreamed > 0).sum()),
        without_text=int((frame.streamed_tokens - frame.chunk_counts)[without_text].sum()),
        reasoning=int(np.nansum(reasoning)),
        reasoning_requests=int((reasoning > 0).sum()),
        unanswered_requests=int((complete & unanswered(frame)).sum()),
        spread_per_chunk=round(float(frame.streamed_tokens[spread].sum()) / chunks, 3) if chunks else None,
        contradicted_chunks=int(frame.recorded_tokens[contradicted].sum()),
        contradicted_totals=int((frame.recorded_tokens + frame.unstreamed_tokens)[contradicted].sum()),
    )


def _truncated_inputs(run: Run, frame: Frame) -> summary.TruncatedInputs | None:
    """Return the number of complete requests with inputs that the server truncated, or None if there are none.

    The server reports the length of the truncated input. For these requests, the reported prompt length is therefore
    smaller than the requested one.
    """
    limit = run.header.server_notes.get("truncates_to")
    complete = frame.measured & frame.complete
    shorter = complete & (frame.prompt_reported < frame.prompt_asked)
    if limit is None or not shorter.any():
        return None
    inputs = np.where(np.isnan(frame.mark("inputs")), 1, frame.mark("inputs"))
    return summary.TruncatedInputs(
        requests=int(shorter.sum()),
        tokens=limit,
        every_input=bool((shorter == complete).all() and (frame.prompt_reported == limit * inputs)[complete].all()),
    )


def _length_difference(frame: Frame, rows: Booleans, why: str) -> summary.LengthDifference | None:
    """Return the number of the responses that the mask `rows` selects, and their mean reported and requested lengths.

    `why` is the reason why these responses do not have the requested length. Return None if no response is selected.
    """
    if not rows.any():
        return None
    return summary.LengthDifference(
        responses=int(rows.sum()),
        tokens_mean=round(float(frame.output_reported[rows].mean()), 2),
        requested_mean=round(float(frame.output_asked[rows].mean()), 2),
        why=why,
    )


def _why_early(run: Run, frame: Frame, early: Booleans) -> str:
    """Return why the responses in `early` are shorter than requested, or an empty string if the reason is unknown."""
    piece = run.header.server_notes.get("prompt_piece_tokens")
    if piece and early.any() and bool((frame.output_reported[early] % piece == 0).all()):
        return f"{run.header.server_title} generates in pieces of {piece:,} tokens, and the next did not fit"
    if run.header.server_notes.get("ignores_eos") is False:
        return f"{run.header.server_title} cannot be told to ignore the end-of-text token"
    return ""


def _why_longer(run: Run, frame: Frame, longer: Booleans) -> str:
    """Return why the responses in `longer` are longer than requested, or an empty string if the reason is unknown."""
    piece = run.header.server_notes.get("prompt_piece_tokens")
    if piece and longer.any() and bool((frame.output_asked[longer] > piece).all()):
        return f"{run.header.server_title} generates in pieces of {piece:,} tokens"
    return ""


def _throughput(frame: Frame, health: summary.ClientHealth) -> summary.Throughput:
    """Return the rates of the measurement window, with their confidence intervals and their relative error.

    The timestamps at both ends of the window are uncertain by an error bar. The relative error is therefore `2 *
    error_bar / length`, where `length` is the length of the window. `health` contains two error bars. If the window is
    the whole run, the error bar of the E2E latency is used. Otherwise, the error bar of a single timestamp is used.
    """
    span = frame.span_ns
    ci95, ci95_none = stats.rate_intervals(frame)
    bar_s = health.error_bar_e2e_s if frame.whole else health.error_bar_s
    error_share = None if span is None or bar_s is None else stats.round_to_ns(2 * bar_s / (span[1] - span[0]) * 1e9)
    rates = [metric for metric in METRICS.values() if metric.per == "run" and metric.unit != "s"]
    answered = bool((frame.measured & frame.complete).any())  # Without complete requests there is no throughput.
    figures = {rate.name: _figure(rate, frame) if answered else None for rate in rates}
    span_s = None if span is None else stats.round_to_ns((span[1] - span[0]) / 1e9)
    tokens_per_s = figures["output_tokens_per_s"]
    return summary.Throughput(
        completed=frame.completed_inside,
        output_tokens=None if tokens_per_s is None or span_s is None else round(tokens_per_s * span_s),
        span_s=span_s,
        **figures,
        error_share=error_share,
        ci95=ci95,
        ci95_none=ci95_none,
    )


def _figure(metric: Metric, frame: Frame) -> float | None:
    value: float | None = metric.formula(frame)
    return None if value is None else stats.round_to_ns(value)


def _rows_in_sessions(run: Run, frame: Frame) -> Booleans:
    """Return a mask of the requests whose class of traffic has sessions.

    In a run without classes, the mask selects all requests.
    """
    if frame.classes is None:
        return np.ones(len(frame), np.bool_)
    with_sessions = np.array([facts.load.sessions for facts in run.header.traffic], np.bool_)
    rows: Booleans = with_sessions[frame.classes.index]
    return rows


def _turns(frame: Frame, in_sessions: Booleans) -> list[summary.TurnLatency]:
    """Return the latencies of each turn of multi-turn sessions. The list is empty for other workloads.

    `in_sessions` is a mask of the requests of sessions.
    """
    if not frame.turn.any():
        return []
    sampled = frame.sampled & in_sessions
    turn, reported = frame.turn[sampled], frame.prompt_reported[sampled]
    cached = frame.mark(CACHED)[sampled]
    ttft_s, e2e_s = (METRICS[name].rows(frame)[sampled] for name in ("ttft_s", "e2e_s"))
    turns = []
    for number in np.unique(turn[turn < MAX_TURNS]):
        rows = turn == number
        prompts = reported[rows & ~np.isnan(reported)]
        stated = rows & ~np.isnan(reported) & ~np.isnan(cached)
        turns.append(
            summary.TurnLatency(
                turn=int(number) + 1,
                n=int(rows.sum()),
                prompt_tokens_mean=round(float(prompts.mean()), 2) if len(prompts) else None,
                cached_share=round(float(cached[stated].sum() / reported[stated].sum()), 4) if stated.any() else None,
                ttft_s=stats.describe(ttft_s[rows & ~np.isnan(ttft_s)]),
                e2e_s=stats.describe(e2e_s[rows & ~np.isnan(e2e_s)]),
            )
        )
    return turns
