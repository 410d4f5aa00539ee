"""What readers rely on in those parts of a Run that may hold anything: types that a damaged or foreign line fails.
Other names may hold whatever they like."""

from __future__ import annotations

from types import GenericAlias
from typing import Annotated, Any

import msgspec

from loadgen.record import Count, Whole


def _of(kind: Any) -> Any:
    """A type: of a dict's an object in which values of these names, where it has them, are of these types."""
    if not isinstance(kind, dict):
        return GenericAlias(list, _of(*kind)) if isinstance(kind, list) else kind
    fields = [(name, _of(each), msgspec.UNSET) for names, each in kind.items() for name in names.split()]
    return msgspec.defstruct("Object", fields)


_Number, _Text = Whole | float, str | None
CLOCK = msgspec.defstruct("Clock", [("workers", list[Count]), ("offset_ns", Whole), ("uncertainty_ns", Whole)])
_CARD = {
    "index": int | str,
    "name gap": str,
    "memory_used_bytes busy power_w sm_clock_hz engine_active tensor_active dram_active": _Number,
    "memory_total_bytes": _Number | None,
    "processes": [{"pid": int, "name gap": str, "memory_used_bytes rss_bytes": _Number | None}],
}
_SAMPLED = {
    **_CARD,
    "cpu_ns wall_ns reads full_reads retransmits out_of_order stall_ns_max clock_disagreement_ns users": Whole,
    "running waiting kv_used kv_used_max engines kv_tokens taken_share": _Number,
    "prompt_tokens output_tokens cached_prompt_tokens": _Number,
    "requests_finished requests_failed preemptions rejections": _Number,
    "moment": str,
    "simulated": bool,
    "simulated_speed": _Number,
    "late_counts": dict[Annotated[int, msgspec.Meta(ge=-1, le=256)], Count],
    "gpus": [_CARD],
}
_PLAN = {
    "server url endpoint label arrivals workload platform gpu_model": _Text,
    "n workers warmup repeat repeats max_in_flight": Whole | None,
    "duration_s timeout_s": _Number | None,
    "input_tokens output_tokens": int | str | None,
    "seed": int | None,
    "ignore_eos": bool,
    "window_s": tuple[float, float] | None,
    "objectives goodput": [str],
}
_FACTS = {
    "name version model url endpoint title prompts forced over_limit": _Text,
    "simulated exact": bool,
    "speed": _Number | None,
    "hardware": {"gpu model": str, "tensor_parallel": Whole},
    "prediction": [{"figure": str, "value low high": _Number}],
    "limits": dict[str, bool | int | float | str | None] | None,
    "notes": {"prompt_piece_tokens": int, "ignores_eos": bool, "memory_option memory_taken": str},
    "stamps": str,
    "machines": [msgspec.defstruct("Machine", [("name", str)], bases=(CLOCK,), kw_only=True)],
    "not_measured": dict[str, str],
    "gpu host": _CARD | {"gpus": [_CARD]},
}
SAMPLE, HEADER = _of(_SAMPLED), _of({"plan": _PLAN, "server client telemetry": _FACTS})
