"""What a GPU's part of `loadgen dissect` asks of torch, with a torch.cuda that is made up: none is at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from loadgen.dissect import DissectError, training
from loadgen.dissect.inference import self_times_s
from loadgen.dissect.models import process_group as group
from loadgen.dissect.results import DeviceLimits
from loadgen.dissect.techniques import parse_technique

CLOCK_HZ = 1.4e9


class Event:
    """One that stands where the counter was."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.at = cuda, 0

    def record(self) -> None:
        self.at = self.cuda.slept

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at) / CLOCK_HZ


class Cuda:
    """A GPU that only sleeps."""

    def __init__(self) -> None:
        self.slept, self.waits = 0, list[str]()

    def sleep(self, cycles: int) -> None:
        self.slept += cycles


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.waits.append(f"{self.name} for {other.name}")

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    main = Stream(made, "main")
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(made))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(made, "link"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _: main)
    group._cycles_per_s.cache_clear()
    return made


def test_a_link_lasts_as_long_as_told_by_the_clock_that_runs(cuda: Cuda) -> None:
    """The counter's rate is measured once; the link's stream waits for the partial sum, and the block for the link."""
    device = torch.device("cuda", 0)
    for _ in range(2):
        before = cuda.slept
        arrived = group._start_delay(0.01, device)
        asked = cuda.slept - before
        assert cuda.waits[-1] == "link for main"
        arrived()
        assert cuda.waits[-1] == "main for link"
    assert asked == pytest.approx(0.01 * CLOCK_HZ, rel=1e-6)


def event(name: str, device: DeviceType, begin: float, took: float) -> Any:
    """As torch.profiler has them: a kernel is its operator's and stands by itself too."""
    spent = SimpleNamespace(start=begin, end=begin + took)
    return SimpleNamespace(
        name=name, device_type=device, time_range=spent, self_device_time_total=took, self_cpu_time_total=1.0
    )


def test_a_kernel_counts_once() -> None:
    """By its operator, in the order of these."""
    events = [
        event("aten::mm", DeviceType.CPU, 3, 200),
        event("aten::add", DeviceType.CPU, 1, 100),
        event("sgemm", DeviceType.CUDA, 4, 200),
        event("add_kernel", DeviceType.CUDA, 2, 100),
    ]
    assert self_times_s(events, "cuda") == pytest.approx([100e-6, 200e-6])


def test_collectives_are_counted_by_phase_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of NCCL, each stretch once and no longer than its phase; not their launch."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    events = [event(name, DeviceType.CPU, 1000 * place, 1000) for place, name in enumerate(training.PARTS)]
    events += [event("backward", DeviceType.CUDA, 1000, 500)]  # torch.profiler repeats it from its first kernel on
    events += [event("nccl:all_gather", DeviceType.CPU, 0, 900)]
    for begin in (100, 200):  # both until 500
        events.append(event("ncclDevKernel_AllGather_RING_LL", DeviceType.CUDA, begin, 500 - begin))
    events.append(event("ncclDevKernel_ReduceScatter_Sum_f32", DeviceType.CUDA, 1600, 700))
    told = training._communication_s(SimpleNamespace(events=lambda: events))
    assert told == pytest.approx({"forward": 400e-6, "backward": 400e-6, "optimiser": 300e-6})


def test_what_does_not_fit_is_said_beside_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured; where none fits, that is the answer."""

    def shared(work: Any, asked: Any, *_: Any) -> Any:
        if work is training._measure_limits:
            return DeviceLimits("probed", 1e11, 1e10, "measured")
        if asked[1].name == "naive":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return training._measure_technique(asked)

    monkeypatch.setattr(training, "run_in_processes", shared)
    asked: dict[str, Any] = {"model": "llama-2-7b", "layers": 1, "dtype": "fp32", "sequence": 8, "repeats": 1}
    monkeypatch.setattr(training, "_measure_technique", lambda both: training.TechniqueResult(both[1].name, 1))
    found = training.measure_training(
        training.TrainingSpec(techniques=(parse_technique("naive"), parse_technique("R")), **asked)
    )
    assert [each.cannot for each in found.techniques] == ["it does not fit the memory of this GPU", ""]
    with pytest.raises(DissectError, match="none of these fits"):
        training.measure_training(training.TrainingSpec(techniques=(parse_technique("naive"),), **asked))
