"""The limit line: what the hardware of a run allows, where it is known, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.compare import compare
from loadgen.analysis.hardware_limit import HardwareLimit
from loadgen.analysis.report.findings import hardware_limit_bars, hardware_limit_sentence
from loadgen.analysis.report.page import render
from loadgen.analysis.report.run_document import page_document
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run, Telemetry, read
from loadgen.cli.matrix import write_report
from loadgen.cli.output import Output
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware import HardwareError, model, parse_gpus
from loadgen.servers.hardware.inference import lower_bounds_s
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.studies.matrix import plan_starts
from loadgen.studies.matrix.estimate import gpus_of_start
from tests.support.compared import run as compared
from tests.support.matrices import fabricate, plan
from tests.support.runs import complete, footer, header, part_of, text_of, write

STEP_NS = 20_000_000
NAMED = "NVIDIA H100 80GB HBM3"
CONFIG = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "vocab_size": 32000},
}


def eight() -> list[Record]:
    """Eight requests together, of 512 + 64 tokens: 100 ms to the first one, 20 ms to each other."""
    return [complete(each, [100_000_000 + place * STEP_NS for place in range(64)]) for each in range(8)]


def run_of(tmp_path: Path, *telemetry: Telemetry, **changes: Any) -> Run:
    """Of eight requests on a server whose header says that."""
    told = header(8)
    told = replace(told, **{name: getattr(told, name) | more for name, more in changes.items()})
    records = eight()
    folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    return read(write(folder, [told, *records, *telemetry, footer(records)]))


def limit_of(tmp_path: Path, *telemetry: Telemetry, **changes: Any) -> Any:
    """Of such a run."""
    return summarise(run_of(tmp_path, *telemetry, **changes)).limit


def gpus(*used_bytes: float, name: str = NAMED) -> dict[str, Any]:
    """A header's facts of GPUs of 80 GB, and one reading of them."""
    facts = [{"index": place, "name": name, "memory_total_bytes": 80e9} for place in range(len(used_bytes))]
    read = [{"index": place, "memory_used_bytes": used} for place, used in enumerate(used_bytes)]
    reading = Telemetry(source="gpu", at_ns=0, values={"moment": "load", "gpus": read})
    return {"telemetry": {"gpu": {"by": "NVML", "gpus": facts}}, "reading": reading}


def test_a_known_gpu_and_model_have_a_limit(tmp_path: Path) -> None:
    """By --gpu-model: TPOT, TTFT and throughput at their least and most, and what was measured against them."""
    found = limit_of(tmp_path, plan={"gpu_model": "H100"})
    made = make_deployment("H100", "Llama-2-7b-chat")
    step = lower_bounds_s(made, 0, 0, found.decoding, 512 + 32)
    assert (found.gpu, found.gpus, found.model, found.format) == ("H100 SXM", 1, "Llama-2-7B", "bf16")
    assert (found.known_from, found.data_sheet[:16]) == ("--gpu-model", "NVIDIA H100 data")
    assert found.tpot_s == pytest.approx(max(step.values()), rel=1e-4)
    assert found.tpot_ratio == pytest.approx(0.02 / found.tpot_s, rel=1e-4)
    assert found.mbu == pytest.approx(step["memory"] / 0.02, rel=1e-4)
    assert found.ttft_s == pytest.approx(max(lower_bounds_s(made, 1, 512).values()), rel=1e-4)
    assert 7 < found.decoding < found.in_flight <= 8
    assert 0 < found.mfu < found.throughput_share < 1
    assert (found.tpot_bound, found.exceeds_limit) == ("memory", False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"plan": {"gpu_model": "H100"}, "server": {"model": "my-own-model"}},
        {"plan": {"gpu_model": "a card of another version"}},
        {"plan": {"gpu_model": "H100"}, "server": {"model": "llama-2-70b"}},
        {"plan": {"gpu_model": "H100", "workload": "shared-prefix:groups=2,tokens=400"}},
        {"plan": {"gpu_model": "H100"}, "server": {"simulated": True, "speed": 1.0}},
        {"plan": {"gpu_model": "H100"}, "server": {"model": "m" * 5000}},
    ],
    ids=("no GPU", "unknown model", "unknown GPU", "does not fit", "cached prompts", "scripted", "long name"),
)
def test_what_is_not_known_has_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    """No line and no guess: nor of a simulated server that simulates no GPU, whatever was said."""
    assert limit_of(tmp_path, **changes) is None


def test_responses_that_came_in_one_read_have_no_tpot_ratio(tmp_path: Path) -> None:
    """Without packet timestamps, all tokens of a response can have one timestamp. Their TPOT is 0."""
    told = header(8)
    told = replace(told, plan=told.plan | {"gpu_model": "H100"})
    records = [complete(number, [100_000_000] * 64) for number in range(8)]
    found = summarise(read(write(tmp_path / "run", [told, *records, footer(records)]))).limit
    assert found is not None
    assert (found.tpot_ratio, found.mbu) == (None, None)
    assert found.ttft_ratio


def test_what_a_server_says_opens_no_file(tmp_path: Path) -> None:
    """A model that is served under the path of a config.json, or of its folder, is known by its name or not at all."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert model(str(tmp_path)).layers == CONFIG["num_hidden_layers"]
    for name in (tmp_path, tmp_path / "config.json"):
        assert limit_of(tmp_path, plan={"gpu_model": "H100"}, server={"model": str(name)}) is None


def test_gpus_in_use_are_counted(tmp_path: Path) -> None:
    """Of NVML's four GPUs two hold something: tensor parallel over two, which read twice as fast."""
    told = gpus(70e9, 70e9, 1e9, 0)
    found = limit_of(tmp_path, told["reading"], telemetry=told["telemetry"])
    alone = limit_of(tmp_path, plan={"gpu_model": "H100"})
    assert (found.gpu, found.gpus, found.known_from) == ("H100 SXM", 2, "NVML")
    assert found.tpot_s == pytest.approx(alone.tpot_s / 2, rel=0.01)


def test_one_gpu_needs_no_reading(tmp_path: Path) -> None:
    """A lone one is the one; of several that nobody read none is."""
    assert limit_of(tmp_path, telemetry=gpus(0)["telemetry"]).gpus == 1
    assert limit_of(tmp_path, telemetry=gpus(0, 0)["telemetry"]) is None
    assert limit_of(tmp_path, telemetry=gpus(0, name="a GPU of next year")["telemetry"]) is None


def test_a_simulated_gpu_is_as_fast_as_its_clock(tmp_path: Path) -> None:
    """At ten times speed the limit is ten times lower, and the same share is had of a tenth."""
    told = {"gpu": "H100 SXM", "model": "Llama-2-7B", "tensor_parallel": 1}
    found = limit_of(tmp_path, server={"simulated": True, "speed": 10.0, "hardware": told, "model": "any"})
    real = limit_of(tmp_path, plan={"gpu_model": "H100"})
    assert found.known_from == "simulated"
    assert found.tpot_s == pytest.approx(real.tpot_s / 10, rel=1e-4)
    assert found.mbu == pytest.approx(real.mbu / 10, rel=1e-4)
    assert found.mfu == pytest.approx(real.mfu / 10, rel=1e-4)
    assert found.throughput_share == pytest.approx(real.throughput_share / 10, rel=1e-4)


def test_a_simulated_gpu_with_changed_figures_has_the_limit_of_these(tmp_path: Path) -> None:
    """With twice the memory bandwidth, a decode step takes half of the time. With drafts, there is no limit."""
    facts = {"gpu": "H100 SXM", "model": "Llama-2-7B", "tensor_parallel": 1}
    plain, changed, saved, own = (
        limit_of(tmp_path, server={"simulated": True, "hardware": facts | more, "model": "any"})
        for more in ({}, {"changes": ["memory_bandwidth=6.7TB/s"]}, {"saves_work": True}, {"own_gpu": True})
    )
    assert changed.tpot_s == pytest.approx(plain.tpot_s / 2, rel=0.01)
    assert changed.data_sheet == f"{plain.data_sheet}, with memory_bandwidth=6.7TB/s"
    assert (saved, own) == (None, None)


def test_the_models_name_tells_the_format(tmp_path: Path) -> None:
    """Four bits are a quarter of the bytes."""
    found = limit_of(tmp_path, plan={"gpu_model": "H100"}, server={"model": "meta-llama/Llama-2-7b-chat-AWQ"})
    assert (found.model, found.format) == ("Llama-2-7B", "int4")


def test_a_limit_that_was_beaten_is_doubted(tmp_path: Path) -> None:
    """No card is faster than its data sheet: a warning asks which one it is."""
    found = limit_of(tmp_path, plan={"gpu_model": "T4"}, server={"model": "Qwen3-0.6B"})
    slow = limit_of(tmp_path, plan={"gpu_model": "L4"}, server={"model": "Llama-3.1-8B"})
    assert found is None or not found.exceeds_limit
    assert slow.exceeds_limit
    assert hardware_limit_sentence(slow).endswith("Name them with --gpu-model.")


def test_page_and_terminal_say_it(tmp_path: Path) -> None:
    """One finding, which the page has below its cards."""
    run = run_of(tmp_path, plan={"gpu_model": "H100"})
    assert "Hardware limit (1 x H100 SXM, Llama-2-7B, bf16): " in " ".join(text_of(summarise(run)).split())
    assert "Share of the hardware limit (1 x H100 SXM, Llama-2-7B, bf16)" in render(page_document([part_of(run)]))


def test_bars_are_shares_of_the_limit(tmp_path: Path) -> None:
    """Throughput is a share of the maximum. For latencies, the minimum is a share of the measured mean."""
    limit: HardwareLimit = limit_of(tmp_path, plan={"gpu_model": "H100"})
    bars = hardware_limit_bars(limit)
    assert [bullet.label for bullet in bars.bullets] == ["Output throughput", "Mean TPOT", "Mean TTFT"]
    shares = (limit.throughput_share, 1 / (limit.tpot_ratio or 0), 1 / (limit.ttft_ratio or 0))
    assert tuple(bullet.share for bullet in bars.bullets) == shares
    assert bars.bullets[1].text == "23%: minimum 4.58 ms, measured 20.0 ms"
    without_tpot = hardware_limit_bars(replace(limit, tpot_ratio=None))
    assert [bullet.label for bullet in without_tpot.bullets][1:] == ["Mean TTFT"]


def test_a_sentence_holds_ratio_share_and_overhead(tmp_path: Path) -> None:
    """In a reader's words."""
    found: HardwareLimit = limit_of(tmp_path, plan={"gpu_model": "H100"})
    said = hardware_limit_sentence(found)
    assert "Mean TPOT is 4.4 times the memory limit of 4.5" in said
    assert "MBU 23%, MFU 4.5%; with 7.4 requests decoding" in said
    assert "of a step is overhead" in said


def test_cards_are_read_as_people_write_them() -> None:
    """A number, and a name."""
    assert (parse_gpus("H100"), parse_gpus("4 x A100"), parse_gpus("8xb200")) == (
        (1, "H100 SXM"),
        (4, "A100-80GB SXM"),
        (8, "B200 SXM"),
    )
    with pytest.raises(HardwareError, match="did you mean"):
        parse_gpus("2 x H1000")


def test_a_mistyped_gpu_is_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(PlanError, match=r"--gpu-model.*unknown GPU 'H1000'"):
        Plan(server="vllm", n=1, gpu_model="H1000")
    assert Plan(server="vllm", n=1, gpu_model="2 x H100").gpu_model == "2 x H100"


def test_a_comparison_has_a_line_for_each_side(tmp_path: Path) -> None:
    """So that a ratio of two servers is read beside how far either is from its hardware."""
    sides = [header(8).plan | {"gpu_model": name} for name in ("H100", "2 x H100")]
    a, b = (compared(tmp_path / name, plan=plan) for name, plan in zip("ab", sides, strict=True))
    notes = [note for note in compare([a], [b]).notes if "Hardware limit" in note]
    assert [note[:25] for note in notes] == ["A: Hardware limit (1 x H1", "B: Hardware limit (2 x H1"]


def test_a_matrix_says_it_of_each_cell(tmp_path: Path) -> None:
    """matrix.json has the limit of its first valid run, the page a table of them; without a GPU there is neither."""
    folder = fabricate(tmp_path / "m")
    told: dict[str, Any] = json.loads((folder / "matrix.json").read_text("utf-8"))
    assert "Hardware limits, from" not in (folder / "matrix.html").read_text("utf-8")
    assert [cell["limit"] for cell in told["cells"] if cell["limit"]] == []
    for file in folder.rglob("run.jsonl"):
        file.write_text(
            file.read_text("utf-8").replace('"platform":', '"gpu_model":"4 x A100","platform":', 1), "utf-8"
        )
    write_report(folder, Output(as_json=False, quiet=True))
    told = json.loads((folder / "matrix.json").read_text("utf-8"))
    assert {cell["limit"]["gpus"] for cell in told["cells"] if cell["runs"]} == {4}
    page = (folder / "matrix.html").read_text("utf-8")
    assert page.count("4 x A100-80GB SXM") == len([cell for cell in told["cells"] if cell["runs"]])


def test_a_host_of_a_matrix_names_the_gpus_of_its_runs(tmp_path: Path) -> None:
    """As many as the model is spread over; a simulated server says itself what it simulates."""

    def of(gpu: str, **options: Any) -> str:
        changes = {"hosts": [{"name": "here", "platform": "A", "gpu": gpu}], "options": options}
        return gpus_of_start(plan_starts(plan(launch="process", **changes))[0])

    assert (of("A800"), of("A800", tensor_parallel=4)) == ("1 x A800-80GB SXM", "4 x A800-80GB SXM")
    assert (of("a card of our own"), of("")) == ("", "")
    simulated = plan(launch="simulated", hosts=[{"name": "here", "platform": "A", "gpu": "A800"}])
    assert not gpus_of_start(plan_starts(simulated)[0])
