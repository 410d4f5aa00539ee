"""The twin: of a server whose constants are known, because it is simulated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.analysis import prediction
from loadgen.analysis.build_summary import summarise
from loadgen.analysis.repeats import figures_of
from loadgen.analysis.run.runfile import Run, Telemetry
from loadgen.cli.twin import predict
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware.inference import ServingOptions
from loadgen.servers.simulated.discrete_event import FOREVER_NS, FrontEnd
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.scheduler_presets import find_engine
from loadgen.studies import twin_fitting as twin_fit
from loadgen.studies.simulate import ServerModel, resolve_model, run_in_memory
from loadgen.studies.twin import FORMAT, HARDWARE_CONSTANTS, LINEAR_CONSTANTS, Twin, TwinConstant, read_twin

CPU = {"step_s": 5e-3, "sequence_s": 3e-4, "token_s": 5e-5, "context_s": 2e-7, "request_s": 4e-3, "path_s": 8e-3}
H100 = {"step_s": 1e-3, "sequence_s": 5e-5, "bandwidth": 0.7, "compute": 0.8, "request_s": 1e-3, "path_s": 5e-3}
CARD: dict[str, Any] = {"gpu": "H100", "model": "llama-3.1-8b"}


def truth(values: dict[str, float], **more: Any) -> Twin:
    """A twin that is exact."""
    known = HARDWARE_CONSTANTS if "bandwidth" in values else LINEAR_CONSTANTS
    constants = {name: TwinConstant(value=values[name], low=0, high=1, unit="s", meaning="") for name in known}
    facts: dict[str, Any] = {
        "version": "0",
        "server": "vllm",
        "server_version": "0.32.0",
        "rules": "vllm",
        "served": "m",
    }
    facts |= {"vintage": "current", "kv_tokens": 200_000, "draws": [], "residual": {}, "runs": [{"run": "a"}]}
    return Twin(**(facts | {"constants": constants} | more))


def run_of(server: Twin, **plan: Any) -> Run:
    """What the server would have done."""
    asked = {"server": "vllm", "output_tokens": 64, "metrics_every_s": 1.0, **plan}
    return run_in_memory(Plan(**asked), ServerModel(twin=server))


pytestmark = pytest.mark.xdist_group("fitted twins")  # the fits take a second, so one process makes them


@pytest.fixture(scope="module")
def cpu() -> Twin:
    """A server on hardware that nobody describes, with a budget of 2048 tokens a step."""
    return truth(CPU, step_tokens=2048)


@pytest.fixture(scope="module")
def fitted(cpu: Twin) -> Twin:
    """Its twin, from a burst and a closed loop."""
    runs = [run_of(cpu, n=64), run_of(cpu, n=60, arrivals="closed:4", seed=1)]
    return twin_fit.fit(runs, "vllm", None, {"vintage": "current"})


def test_constants_of_a_server_without_a_gpu_are_found(fitted: Twin) -> None:
    """Step, prompt token and front end within a tenth; what sequences of one length cost, be it for each or for what it
    holds, is one figure, and within a tenth too."""
    found = fitted.values()
    assert found["step_s"] == pytest.approx(CPU["step_s"], rel=0.1)
    assert found["token_s"] == pytest.approx(CPU["token_s"], rel=0.1)
    assert found["request_s"] == pytest.approx(CPU["request_s"], rel=0.2)
    each, true = (values["sequence_s"] + 544 * values["context_s"] for values in (found, CPU))
    assert each == pytest.approx(true, rel=0.1)


def test_the_budget_of_a_step_is_that_which_makes_as_many_steps(fitted: Twin, cpu: Twin) -> None:
    """2048 tokens, where the rules' own are 8192; a load too light to show it leaves it open."""
    assert fitted.step_tokens == 2048
    light = [run_of(cpu, n=30, arrivals="closed:1")]
    assert twin_fit.fit(light, "vllm", None, {"vintage": "current"}).step_tokens is None


def test_the_cache_is_as_the_metrics_say(fitted: Twin) -> None:
    """200,000 tokens."""
    assert fitted.kv_tokens == 200_000


def test_a_limit_on_sequences_shows_where_requests_wait_with_room_in_the_cache() -> None:
    """32 running, again and again, while others wait."""
    crowded = run_of(truth(CPU, running_limit=32), n=200)
    assert twin_fit.fit([crowded], "vllm", None, {"vintage": "current"}).running_limit == 32


def test_it_predicts_loads_it_has_not_seen(fitted: Twin, cpu: Twin) -> None:
    """A Poisson load and a burst three times as large: throughput within 3%, medians within 8%."""
    for load in ({"n": 100, "arrivals": "poisson:4"}, {"n": 200}):
        measured = twin_fit.observe_run(run_of(cpu, **load, seed=7))
        was = twin_fit.figures(measured, measured.ttft_s, measured.tpot_s, measured.ended_s)
        told = twin_fit.simulate_run(measured, fitted)
        for figure, most in (("output_tokens_per_s", 0.03), ("ttft.p50", 0.08), ("tpot.p50", 0.08)):
            assert told[figure] == pytest.approx(was[figure], rel=most), figure


def test_on_known_hardware_bandwidth_and_compute_are_found() -> None:
    """Shares of what kernels reach elsewhere, within 8%; the step's own cost from memory-bound decoding."""
    server = truth(H100, **CARD)
    runs = [run_of(server, n=64, output_tokens="uniform:20..200"), run_of(server, n=40, arrivals="closed:2", seed=1)]
    deployment = find_engine("vllm").deployment("H100", "llama-3.1-8b")
    fitted = twin_fit.fit(runs, "vllm", deployment, {"vintage": "current", **CARD})
    found = fitted.values()
    assert (found["bandwidth"], found["compute"]) == pytest.approx((0.7, 0.8), rel=0.08)
    # Elsewhere, the server's memory is as slow, because no typical kernel is. Its compute is that of typical kernels.
    elsewhere = fitted.values(elsewhere=True)
    assert 0.5 < elsewhere["bandwidth"] < 0.8
    assert abs(math.log(elsewhere["compute"])) < 0.05
    assert elsewhere["path_s"] == pytest.approx(twin_fit.DEFAULT_START["path_s"], rel=0.05)


def test_the_slope_of_the_cauchy_loss_is_its_derivative() -> None:
    """At 0, near 0 and far from 0, on both sides."""
    points = np.array([-30.0, -1.0, -1e-9, 0.0, 1e-3, 2.0])
    changes = twin_fit._cauchy(points + 1e-5) - twin_fit._cauchy(points - 1e-5)
    assert twin_fit._cauchy_slope(points) == pytest.approx(changes / 2e-5, rel=1e-4)


def test_other_hardware_gets_the_constants_that_carry_over() -> None:
    """Another GPU, model or TP; on the measured server, the fitted values stay."""
    twin = msgspec.structs.replace(truth(H100, **CARD), transferred=H100 | {"path_s": 0.5})
    plan = Plan(server="vllm", n=1)
    here, there = (resolve_model(plan, ServerModel(twin=twin, gpu=gpu)) for gpu in ("H100", "A100"))
    assert (here.path_s, there.path_s) == (H100["path_s"], 0.5)
    assert resolve_model(plan, ServerModel(twin=twin, tensor=2)).path_s == 0.5
    assert resolve_model(plan, ServerModel(twin=truth(H100, **CARD), gpu="A100")).path_s == H100["path_s"]


def test_a_twin_of_sglang_can_be_fitted() -> None:
    """The tables have no time per sequence for SGLang, and a fit starts at a small one."""
    server = truth(H100 | {"sequence_s": 1e-6}, **CARD, rules="sglang")
    runs = [run_of(server, n=30), run_of(server, n=20, arrivals="closed:2", seed=1)]
    deployment = find_engine("sglang").deployment("H100", "llama-3.1-8b")
    fitted = twin_fit.fit(runs, "sglang", deployment, {"vintage": "current", **CARD})
    assert fitted.values()["bandwidth"] == pytest.approx(0.7, rel=0.15)


def test_the_host_of_a_mixture_is_that_of_the_twin() -> None:
    """A longer host time per step lengthens the steps of a mixture of experts. Its ratio to the tables carries over."""
    card: dict[str, Any] = {"gpu": "H100", "model": "gpt-oss-120b", "number_format": "mxfp4", "tensor": 2}
    plan = Plan(server="vllm", n=4, output_tokens=32)
    took = []
    for step_s in (1e-3, 3e-3):
        model = ServerModel(twin=truth(H100 | {"step_s": step_s}, **card))
        took.append(resolve_model(plan, model).step_time.decode_trend(1, 100)[0])
    assert took[1] - took[0] == pytest.approx(2e-3)
    dense = ServerModel(twin=truth(H100, **card), model="llama-3.1-8b", format="bf16")
    typical = {
        name: find_engine("vllm").deployment("H100", name).host_s[0] for name in ("gpt-oss-120b", "llama-3.1-8b")
    }
    step_s, _ = resolve_model(plan, dense).step_time.deployment.host_s  # type: ignore[attr-defined]
    assert step_s == pytest.approx(H100["step_s"] * typical["llama-3.1-8b"] / typical["gpt-oss-120b"])


def test_a_twin_has_the_serving_options() -> None:
    """Speculative decoding makes steps per token shorter; the policy assumes cached prompts."""
    plan = Plan(server="vllm", n=1)
    twin = truth(H100, **CARD)
    plain = resolve_model(plan, ServerModel(twin=twin))
    serving = ServingOptions(draft_tokens=3, acceptance=0.9, cache_hit_rate=0.25, chunked_prefill="off")
    other = resolve_model(plan, ServerModel(twin=twin, serving=serving))
    assert other.step_time.decode_trend(1, 100)[0] < plain.step_time.decode_trend(1, 100)[0]
    assert (other.policy.cache_hit_rate, other.policy.chunked) == (0.25, False)


def test_predictions_of_other_servers_have_the_errors_of_the_model() -> None:
    """Their intervals are wider, and the accuracy names the twin of another server or the error of the fit."""
    twin = truth(H100, **CARD, residual={"ttft": 0.04, "tpot": 0.03, "rate": 0.02, "ttft.p99": 0.1})
    plan = Plan(server="vllm", n=1)
    here = resolve_model(plan, ServerModel(twin=twin))
    there = resolve_model(plan, ServerModel(twin=twin, tensor=2, format="fp8"))
    assert here.errors == twin.residual
    assert there.errors == pytest.approx(
        {"ttft": math.hypot(0.04, 0.3), "tpot": math.hypot(0.03, 0.075)}
        | {"rate": math.hypot(0.02, 0.075), "ttft.p99": math.hypot(0.1, 0.3)}
    )
    assert here.hardware["accuracy"] == "fit off by TTFT 4.0%, TPOT 3.0%"
    assert there.hardware["accuracy"].startswith("twin of another server, TTFT ")
    assert resolve_model(plan, ServerModel(twin=truth(CPU))).hardware["accuracy"] == "not validated"
    for tensor in (1, 2):
        for serving in (ServingOptions(draft_tokens=3), ServingOptions(pipeline=2), ServingOptions(cache_hit_rate=0.5)):
            model = ServerModel(twin=twin, tensor=tensor, serving=serving)
            assert resolve_model(plan, model).hardware["accuracy"] == "not validated"
    assert resolve_model(plan, ServerModel(twin=twin, vintage="2023")).hardware["accuracy"] == "not validated"
    assert resolve_model(plan, ServerModel(twin=twin, running_limit=8)).hardware["accuracy"] == "not validated"
    cached = Plan(server="vllm", n=1, workload="shared-prefix:groups=2,tokens=128")
    other = ServerModel(twin=twin, tensor=2, format="fp8")
    assert resolve_model(cached, other).hardware["accuracy"] == "not validated"


def test_a_twin_without_hardware_refuses_options_of_the_hardware() -> None:
    """They would have no effect. Options of the scheduler have one."""
    plan = Plan(server="vllm", n=1)
    for serving in (ServingOptions(draft_tokens=3), ServingOptions(pipeline=2), ServingOptions(expert_parallel=2)):
        with pytest.raises(PlanError, match="fitted without hardware, so --pp, --ep"):
            resolve_model(plan, ServerModel(twin=truth(CPU), serving=serving))
    cached = ServingOptions(cache_hit_rate=0.5)
    assert resolve_model(plan, ServerModel(twin=truth(CPU), serving=cached)).policy.cache_hit_rate == 0.5


def test_intervals_hold_the_truth(fitted: Twin, cpu: Twin) -> None:
    """Of the figures of another load, and wider for a twin that fits worse."""
    plan = Plan(server="vllm", n=60, arrivals="poisson:3", output_tokens=64, seed=5)
    told = predict(plan, ServerModel(twin=fitted))
    was = figures_of(summarise(run_in_memory(plan, ServerModel(twin=cpu))), thin=True)
    for each in told:
        if each.figure.endswith("p50"):
            assert each.low <= (was[each.figure] or 0) <= each.high, each
    worse = msgspec.structs.replace(fitted, residual={"rate": 0.5, "ttft": 0.5, "tpot": 0.5})
    wide = {each.figure: each.high / each.low for each in predict(plan, ServerModel(twin=worse))}
    assert all(wide[each.figure] > each.high / each.low for each in told if each.figure.endswith("p50"))


def test_an_interval_is_of_draws_and_of_what_the_fit_missed() -> None:
    """Logarithms: variances add, that of runs of one server too; 1.96 deviations to either side."""
    (found,) = prediction.predict({"ttft.p50": 2.0}, [{"ttft.p50": 2.0 * math.exp(0.3)}], {"ttft": 0.4}, 0.1)
    half = math.hypot(0.98, 0.1)
    assert (found.low, found.high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))


def test_what_if() -> None:
    """Half the cache is asked for; four cards hold more than four times as much, and decode faster."""
    server, plan = truth(H100, **CARD), Plan(server="vllm", n=1)
    assert resolve_model(plan, ServerModel(twin=server, kv_tokens=100_000)).kv_tokens == 100_000
    one, four = (resolve_model(plan, ServerModel(twin=server, tensor=number)) for number in (1, 4))
    assert four.kv_tokens > 4 * one.kv_tokens
    assert four.step_time.decode_trend(64, 64 * 1000)[0] < 0.6 * one.step_time.decode_trend(64, 64 * 1000)[0]
    quantised = resolve_model(plan, ServerModel(twin=server, format="fp8"))
    assert quantised.step_time.decode_trend(1, 1000)[0] < one.step_time.decode_trend(1, 1000)[0]
    assert quantised.hardware["model"] == "Llama-3.1-8B-fp8"


def test_without_hardware_there_is_no_other_hardware(cpu: Twin) -> None:
    """--tp of a twin that knows no GPU would change nothing: it says how to have one that does."""
    with pytest.raises(PlanError, match="this twin was fitted without hardware") as refused:
        resolve_model(Plan(server="vllm", n=1), ServerModel(twin=cpu, tensor=4))
    assert "loadgen twin fit RUN --gpu H100" in refused.value.hint


def test_the_file_is_read_as_it_was_written(fitted: Twin, tmp_path: Path) -> None:
    """JSON, with a format number; what is none says how to get one."""
    file = tmp_path / "twin.json"
    file.write_bytes(msgspec.json.encode(fitted))
    assert read_twin(file) == fitted
    found = json.loads(file.read_text())
    assert found["format"] == FORMAT
    for text, words in (
        ("{}", "is not a twin"),
        (json.dumps(found | {"format": FORMAT + 1}), "by a newer loadgen"),
        (json.dumps(found | {"draws": [[1.0]]}), "unexpected constants for a twin"),
    ):
        file.write_text(text)
        with pytest.raises(PlanError, match=words):
            read_twin(file)
    with pytest.raises(PlanError, match="cannot read"):
        read_twin(tmp_path / "none.json")


def test_a_run_with_too_little_in_it_is_refused(cpu: Twin) -> None:
    """Ten complete requests at least."""
    with pytest.raises(PlanError, match="9 complete requests; a fit needs at least 10"):
        twin_fit.observe_run(run_of(cpu, n=9))


def test_a_client_waits_for_the_response_that_ended_first() -> None:
    """The first requests wait for none, and neither does a request before which no client was free."""
    waits = twin_fit.closed_loop_waits([0, 1, 50, 61, 62], [60, 40, 90, 70, 80], clients=2)
    assert waits == [None, None, (1, 10), (0, 1), None]


@pytest.mark.parametrize("slower", [0.9, 1.002, 1.2])
def test_a_closed_loop_is_replayed_as_one(slower: float) -> None:
    """If the steps of the twin take another time than those of the server, requests still arrive after the responses
    that they wait for. Latencies change with the duration of a step, and not by whole steps."""
    server = truth(H100, **CARD)
    run = run_of(server, n=60, arrivals="closed:4")
    seen = twin_fit.observe_run(run)
    assert sum(wait is not None for wait in seen.waits) == 56
    constants = {name: msgspec.structs.replace(each) for name, each in server.constants.items()}
    for name in ("bandwidth", "compute"):
        constants[name] = msgspec.structs.replace(constants[name], value=constants[name].value / slower)
    ttft_s, tpot_s, _ = twin_fit.replay_on_twin(seen, msgspec.structs.replace(server, constants=constants))
    assert np.median(ttft_s) / np.median(seen.ttft_s) == pytest.approx(slower, rel=0.03)
    assert np.median(tpot_s) / np.median(seen.tpot_s) == pytest.approx(slower, rel=0.05)


def test_prompts_with_a_common_beginning_are_replayed_as_such(cpu: Twin) -> None:
    """The prefix cache of the replay knows what that of the server knew, of shared prefixes and of sessions."""
    for workload in ("shared-prefix:groups=2,tokens=400", "multi-turn:turns=3"):
        run = run_of(cpu, n=20, workload=workload, arrivals="closed:2")
        seen = twin_fit.observe_run(run)
        told, was = twin_fit.simulate_run(seen, cpu), twin_fit.figures(seen, seen.ttft_s, seen.tpot_s, seen.ended_s)
        assert told["ttft.p50"] == pytest.approx(was["ttft.p50"], rel=0.05), workload


def test_runs_with_classes_are_fitted_and_predicted(cpu: Twin) -> None:
    """A twin of one mix of an open class, a closed loop, sessions and shared prefixes predicts another mix. The replay
    knows the prefix cache of each class."""
    tables: list[dict[str, Any]] = [
        {"name": "chat", "arrivals": "poisson:3", "input_tokens": "uniform:100..900"},
        {"name": "batch", "concurrency": 3, "output_tokens": 100},
        {"name": "dialogs", "concurrency": 2, "workload": "multi-turn:turns=3"},
        {"name": "shared", "arrivals": "poisson:1", "workload": "shared-prefix:groups=7,tokens=400"},
    ]
    mixed = run_of(cpu, traffic=tables, duration_s=20.0)
    seen = twin_fit.observe_run(mixed)
    replayed, measured = (
        twin_fit.simulate_run(seen, cpu),
        twin_fit.figures(seen, seen.ttft_s, seen.tpot_s, seen.ended_s),
    )
    for figure in ("ttft.p50", "ttft.p99", "tpot.p50", "output_tokens_per_s"):
        assert replayed[figure] == pytest.approx(measured[figure], rel=0.02), figure
    twin = twin_fit.fit([mixed, run_of(cpu, n=64)], "vllm", None, {"vintage": "current"})
    tables[0]["arrivals"], tables[1]["concurrency"] = "poisson:6", 1
    other = twin_fit.observe_run(run_of(cpu, traffic=tables, duration_s=20.0, seed=5))
    was = twin_fit.figures(other, other.ttft_s, other.tpot_s, other.ended_s)
    predicted = twin_fit.simulate_run(other, twin)
    for figure, tolerance in (("output_tokens_per_s", 0.03), ("ttft.p50", 0.08), ("tpot.p50", 0.08)):
        assert predicted[figure] == pytest.approx(was[figure], rel=tolerance), figure


def test_a_plan_with_classes_has_a_prediction_with_intervals(fitted: Twin) -> None:
    """`loadgen simulate --twin` states intervals for such plans, of any kind of class."""
    tables = [{"name": "chat", "arrivals": "poisson:3"}, {"name": "batch", "concurrency": 2}]
    for load in ({"traffic": tables, "duration_s": 5.0}, {"traffic": tables[:1], "n": None, "duration_s": 5.0}):
        plan = Plan(server="vllm", output_tokens=16, **load)
        predictions = predict(plan, ServerModel(twin=fitted), 4)
        assert {"ttft.p50", "tpot.p50"} <= {each.figure for each in predictions}
        assert all(each.low <= each.value <= each.high for each in predictions)


def test_the_front_end_takes_in_together_who_came_meanwhile() -> None:
    """At 3 ms each: the first of a burst alone, then the other four at once, 12 ms later; a late one by itself."""
    front_end, jobs = FrontEnd(request_ns=3, path_ns=1), [Job(1, 1, 0, owner=place) for place in range(6)]
    for job in jobs[:5]:
        front_end.accept(job, 0)
    through = [[each.owner for each in front_end.release()], [each.owner for each in front_end.release()]]
    assert (through, front_end.busy_until_ns) == ([[0], [1, 2, 3, 4]], FOREVER_NS)
    front_end.accept(jobs[5], 100)
    assert front_end.cancel(jobs[5])
    assert not front_end.cancel(jobs[0])
    assert [job.arrived_ns for job in jobs] == [4, 16, 16, 16, 16, 0]


def test_what_was_sent_and_never_answered_is_no_sample(cpu: Twin) -> None:
    """Failed requests are in no latency; those without a token are not replayed."""
    run = run_of(cpu, n=40)
    failed = [msgspec.structs.replace(each, state="failed", chunk_ns=[], chunk_tokens=[]) for each in run.records[:20]]
    seen = twin_fit.observe_run(msgspec.structs.replace(run, records=[*failed, *run.records[20:]]))
    assert len(seen.sent_ns) == 20


@pytest.mark.parametrize("arrivals", ["burst", "closed:8"])
def test_measured_rates_are_those_of_the_report(cpu: Twin, arrivals: str) -> None:
    """Of a run that is measured whole: complete requests and tokens over the time to the last token."""
    run = run_of(cpu, arrivals=arrivals, n=40)
    seen = twin_fit.observe_run(run)
    found, summary = twin_fit.figures(seen, seen.ttft_s, seen.tpot_s, seen.ended_s), summarise(run)
    assert summary.window.whole
    assert found["requests_per_s"] == pytest.approx(summary.throughput.requests_per_s, rel=1e-3)
    assert found["output_tokens_per_s"] == pytest.approx(summary.throughput.output_tokens_per_s, rel=1e-3)


def test_metrics_without_a_cache_leave_it_without_a_limit(cpu: Twin) -> None:
    """A server that does not say how much it holds is taken to hold all."""
    run = run_of(cpu, n=20)
    silent = [replace_values(each, kv_tokens=None) for each in run.telemetry]
    found = twin_fit.fit([msgspec.structs.replace(run, telemetry=silent)], "vllm", None, {"vintage": "current"})
    assert found.kv_tokens == twin_fit.UNKNOWN_KV


def replace_values(line: Telemetry, **changes: Any) -> Telemetry:
    """A reading with other figures."""
    return msgspec.structs.replace(line, values=line.values | changes)
