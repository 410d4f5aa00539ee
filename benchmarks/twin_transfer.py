"""Measures how well a twin that was fitted to one server predicts other models, numbers of GPUs and GPUs.

    python -m benchmarks.twin_transfer          # vLLM and SGLang, one minute
    python -m benchmarks.twin_transfer --all    # also TensorRT-LLM and NIM, with the scheduler of vLLM, several minutes

A server is a framework with a model on GPUs, for example Llama-3.1-70B in fp8 on two H100. The published closed loops
in benchmarks/data contain several measurements of each server. A twin is fitted to three loads of one server. It then
predicts the closed loops of every other server with the same framework. These errors are compared with those of
`loadgen simulate` without a twin.

The measurements contain only the mean TTFT and TPOT of each closed loop, but a fit needs single requests. The requests
are therefore reconstructed: the closed loop is simulated without a twin, and all TTFTs and TPOTs are multiplied by a
factor, so that their means equal the measured ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from benchmarks import hardware_model as bench
from loadgen.plan import Plan
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.throughput_model import Load
from loadgen.servers.simulated.scheduler_presets import CURRENT, Engine, find_engine
from loadgen.servers.simulated.step_time import StepTime
from loadgen.studies.simulate import ServerModel, resolve_model, run_in_memory
from loadgen.studies.twin import Twin, TwinConstant
from loadgen.studies.twin_fitting import ClosedLoopWait, FitProblem, Floats, ObservedRun, StepLimits

RULES = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "vllm", "NIM": "vllm"}
"""Scheduler of the twin, by framework. TensorRT-LLM and NIM also mix prompts and decoding in one step."""
MODELLED = ("vLLM", "SGLang")
"""Frameworks whose scheduler and overheads are in the hardware tables."""
FITTED_LOADS = 3
PREDICTED_LOADS = 4
"""Number of closed loops of each server that a twin is fitted to, and that it predicts."""
MAX_FITTED_OUTPUT = 1000
"""Maximum output tokens per request in the loads that a twin is fitted to."""
MAX_FITTED_INPUT = 4096
MAX_FITTED_REQUESTS = 400
"""Approximate maximum number of requests in a load that a twin is fitted to."""
ROUNDS = 10
"""Requests per client of a simulated closed loop."""
MIN_LOADS = 4
"""Servers with fewer measured loads are left out."""


class Server(NamedTuple):
    """A framework with a model on `tp` GPUs."""

    framework: str
    gpu: str
    model: str
    format: str
    tp: int

    @property
    def engine(self) -> Engine:
        """Scheduler and overheads with which the server is simulated."""
        return find_engine(RULES[self.framework])

    @property
    def deployment(self) -> Deployment:
        """The model on the GPUs, with the engine that stands for the framework."""
        return self.engine.deployment(self.gpu, self.model, format_name=self.format, tensor=self.tp)

    def changes(self, other: Server) -> str:
        """Return what differs between two servers, for example `TP` or `GPU, format`."""
        names = {"GPU": "gpu", "model": "model", "format": "format", "TP": "tp"}
        return ", ".join(name for name, field in names.items() if getattr(self, field) != getattr(other, field))


@dataclass(frozen=True, slots=True)
class Transfer:
    """Errors of the predictions of one closed loop: predicted / measured - 1, with a twin of another server and without
    a twin."""

    fitted: Server
    predicted: Server
    lengths: str
    """Tokens per prompt and response, such as `1024/128`."""
    in_flight: int
    ttft_twin: float
    ttft_plain: float
    tpot_twin: float
    tpot_plain: float


def servers(rows: bench.Rows, frameworks: Sequence[str]) -> dict[Server, bench.Rows]:
    """Return the measured closed loops of each server, from short to long prompts and from low to high load.

    `rows` have the columns of closed_loops.csv."""
    loads: dict[Server, bench.Rows] = {}
    for row in rows:
        if row["framework"] in frameworks:
            server = Server(row["framework"], row["gpu"], row["model"], row["format"], int(row["tp"]))
            loads.setdefault(server, []).append(row)
    for measured in loads.values():
        measured.sort(key=lambda row: (int(row["input"]), int(row["output"]), int(row["in_flight"])))
    return {server: measured for server, measured in loads.items() if len(measured) >= MIN_LOADS}


def spaced(rows: bench.Rows, number: int) -> bench.Rows:
    """Return up to `number` rows at equal distances, including the first and the last."""
    indices = np.linspace(0, len(rows) - 1, min(number, len(rows))).round().astype(int)
    return [rows[index] for index in indices]


def batch_wait_s(row: bench.Row) -> float:
    """Return the part of the measured TTFT in which a prompt waits for further prompts."""
    steps = bench.batch_wait_steps(row["framework"], int(row["output"]), int(row["tp"]))
    return max(0, steps - 1) * float(row["tpot_ms"]) / 1e3


def measured_s(row: bench.Row) -> tuple[float, float]:
    """Return the measured mean time to the first token, without the wait for further prompts, and the mean TPOT."""
    return float(row["ttft_ms"]) / 1e3 - batch_wait_s(row), float(row["tpot_ms"]) / 1e3


def with_settings(row: bench.Row, server: Server, deployment: Deployment) -> Deployment:
    """Return a deployment of a server with the settings of the engine that the source of a measurement used.

    The settings of TensorRT-LLM and NIM have no meaning for the engine that stands for them here (see RULES).
    """
    if server.framework not in MODELLED:
        return deployment
    return bench.with_protocol(row["source"], deployment, Load(int(row["input"]), int(row["output"]), 1))[0]


def kv_tokens(row: bench.Row, server: Server) -> int:
    """Return the size of the KV cache of a server in tokens, with the settings that the source of a row used."""
    return server.deployment.kv_tokens(bench.memory_fraction(row["source"]))


class Requests(NamedTuple):
    """Requests of a simulated closed loop, in the order in which they were sent."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    ttft_s: Floats
    tpot_s: Floats


def simulate(row: bench.Row, server: Server, twin: Twin | None, rounds: int = ROUNDS) -> Requests:
    """Simulate the closed loop of a row on a server, with the constants of a twin or without one."""
    spread = bench.SPREAD.get(row["source"], 0.0)

    def lengths(column: str) -> str:
        mean = int(row[column])
        return f"uniform:{round(mean * (1 - spread))}..{round(mean * (1 + spread))}" if spread else str(mean)

    clients = int(row["in_flight"])
    plan = Plan(
        server=RULES[server.framework],
        arrivals=f"closed:{clients}",
        n=clients * rounds,
        input_tokens=lengths("input"),
        output_tokens=lengths("output"),
        metrics_every_s=0.0,
        timeout_s=1e6,
    )
    model = ServerModel(
        gpu=server.gpu,
        model=server.model,
        format=server.format,
        tensor=server.tp,
        kv_tokens=kv_tokens(row, server),
        twin=twin,
    )
    resolved = resolve_model(plan, model)
    assert isinstance(resolved.step_time, StepTime)
    resolved = replace(resolved, step_time=StepTime(with_settings(row, server, resolved.step_time.deployment)))
    run = run_in_memory(plan, model, resolved=resolved)
    records = sorted(run.records, key=lambda record: (record.sent_ns or 0, record.id))
    first_ns = np.array([record.chunk_ns[0] for record in records])
    last_ns = np.array([record.chunk_ns[-1] for record in records])
    output = [len(record.chunk_ns) for record in records]
    return Requests(
        prompt_tokens=[record.prompt_tokens or 0 for record in records],
        output_tokens=output,
        ttft_s=(first_ns - np.array([record.sent_ns for record in records])) / 1e9,
        tpot_s=(last_ns - first_ns) / 1e9 / (np.array(output) - 1),
    )


def reconstruct(row: bench.Row, server: Server) -> ObservedRun:
    """Return the requests of a measured closed loop. Their mean TTFT and TPOT equal the measured values."""
    clients = int(row["in_flight"])
    requests = simulate(row, server, None, max(2, min(ROUNDS, MAX_FITTED_REQUESTS // clients)))
    ttft, tpot = measured_s(row)
    ttft_s = requests.ttft_s * ttft / requests.ttft_s.mean()
    tpot_s = requests.tpot_s * tpot / requests.tpot_s.mean()
    # A heap of the times at which clients send their next requests, and of the requests that they wait for.
    free: list[tuple[float, int]] = [(0.0, -1)] * clients
    sent_s = []
    waits = []
    for index, response_s in enumerate((ttft_s + tpot_s * (np.array(requests.output_tokens) - 1)).tolist()):
        begin_s, before = heappop(free)
        sent_s.append(begin_s)
        waits.append(None if before < 0 else ClosedLoopWait(before, 0))
        heappush(free, (begin_s + response_s, index))
    return ObservedRun(
        name=f"{row['input']}/{row['output']}, {clients} in flight",
        sent_ns=[round(1e9 * at_s) for at_s in sent_s],
        prompt_tokens=requests.prompt_tokens,
        output_tokens=requests.output_tokens,
        prompts=[()] * len(sent_s),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ended_s=max(free)[0],
        tokens=np.zeros((0, 3)),
        waits=waits,
    )


def fit(server: Server, rows: bench.Rows) -> Twin:
    """Return a twin of a server that is fitted to three of its loads. It contains only the values for other servers."""
    short = [row for row in rows if int(row["output"]) <= MAX_FITTED_OUTPUT and int(row["input"]) <= MAX_FITTED_INPUT]
    short.sort(key=lambda row: (int(row["in_flight"]), int(row["output"]), int(row["input"])))
    runs = [reconstruct(row, server) for row in spaced(short, FITTED_LOADS)]
    deployment = with_settings(rows[0], server, server.deployment)
    limits = StepLimits(server.engine, kv_tokens(rows[0], server))
    values = FitProblem(runs, limits, deployment).transferred_constants()
    rules = RULES[server.framework]
    constants = {
        name: TwinConstant(value=value, low=value, high=value, unit="", meaning="") for name, value in values.items()
    }
    return Twin(
        version="",
        server=rules,
        server_version="",
        rules=rules,
        vintage=CURRENT,
        served=server.model,
        gpu=server.gpu,
        model=server.model,
        tensor=server.tp,
        number_format=server.format,
        kv_tokens=limits.kv_tokens,
        constants=constants,
        draws=[],
        residual={},
        runs=[{"run": run.name} for run in runs],
    )


def transfers(rows: bench.Rows, frameworks: Sequence[str] = MODELLED) -> list[Transfer]:
    """Return the errors of all predictions from one server to another one with the same framework.

    `rows` have the columns of closed_loops.csv."""
    loads = servers(rows, frameworks)
    predicted = {server: spaced(measured, PREDICTED_LOADS) for server, measured in loads.items()}
    plain = {server: [_errors(row, server, None) for row in chosen] for server, chosen in predicted.items()}
    results = []
    for fitted in loads:
        twin = fit(fitted, loads[fitted])
        for server, chosen in predicted.items():
            if server == fitted or server.framework != fitted.framework:
                continue
            for row, (ttft_plain, tpot_plain) in zip(chosen, plain[server], strict=True):
                ttft_twin, tpot_twin = _errors(row, server, twin)
                lengths, in_flight = f"{row['input']}/{row['output']}", int(row["in_flight"])
                errors = (ttft_twin, ttft_plain, tpot_twin, tpot_plain)
                results.append(Transfer(fitted, server, lengths, in_flight, *errors))
    return results


def _errors(row: bench.Row, server: Server, twin: Twin | None) -> tuple[float, float]:
    """Return the errors of the predicted mean TTFT and mean TPOT of a closed loop."""
    requests = simulate(row, server, twin)
    wait_s = batch_wait_s(row)
    ttft, tpot = measured_s(row)
    return float(requests.ttft_s.mean() + wait_s) / (ttft + wait_s) - 1, float(requests.tpot_s.mean()) / tpot - 1


def points(results: Sequence[Transfer], quantity: str, *, with_twin: bool) -> list[bench.Point]:
    """Return predictions as points of a benchmark, relative to the measured values. `quantity` is `TTFT` or `TPOT`."""
    chosen = []
    for transfer in results:
        if quantity == "TTFT":
            error = transfer.ttft_twin if with_twin else transfer.ttft_plain
        else:
            error = transfer.tpot_twin if with_twin else transfer.tpot_plain
        server = transfer.predicted
        source = f"{transfer.fitted.changes(server)}, {server.framework}"
        case = f"{server.model} {server.format} {transfer.lengths}, {transfer.in_flight} in flight"
        chosen.append(bench.Point(source, quantity, server.gpu, server.tp, case, 1.0, 1 + error))
    return chosen


def table(results: Sequence[Transfer]) -> Iterator[str]:
    """Yield the lines of a table of median errors, by framework and by what differs between the servers."""
    groups: dict[tuple[str, str], list[Transfer]] = {("all", "all"): list(results)}
    for transfer in results:
        for changed in ("all", transfer.fitted.changes(transfer.predicted)):
            groups.setdefault((transfer.fitted.framework, changed), []).append(transfer)
    yield f"{'':14} {'changed':20} {'rows':>5}  {'TTFT: twin':>10} {'no twin':>7}  {'TPOT: twin':>10} {'no twin':>7}"
    for (framework, changed), members in sorted(groups.items()):
        errors = np.abs(
            [[member.ttft_twin, member.ttft_plain, member.tpot_twin, member.tpot_plain] for member in members]
        )
        ttft_twin, ttft_plain, tpot_twin, tpot_plain = np.median(errors, axis=0)
        yield (
            f"{framework:14} {changed:20} {len(members):5}  {ttft_twin:10.1%} {ttft_plain:7.1%}  "
            f"{tpot_twin:10.1%} {tpot_plain:7.1%}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the median errors with and without a twin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also TensorRT-LLM and NIM")
    parser.add_argument("--framework", action="append", choices=list(RULES), help="only this framework; repeatable")
    options = parser.parse_args(arguments)
    frameworks = tuple(options.framework or (RULES if options.all else MODELLED))
    print("Median errors of closed loops on servers to which the twin was not fitted:\n")
    for line in table(transfers(bench.read_rows("closed_loops"), frameworks)):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
