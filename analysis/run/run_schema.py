"""The types that the fields of a run file must have. A line counts as damaged if one of these fields has another type.

Fields that are not listed may have any type, because newer versions and other tools may add fields.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec

from loadgen.analysis.run.record import Count, Integer


def _to_type(description: Any) -> Any:
    """Convert a type description of this module to a type that msgspec can decode.

    - A dict describes a JSON object: `{"min max": int}` is an object with the integer fields `min` and `max`.
    - A list of one element describes a JSON array: `[int]` is an array of integers.
    - Any other description is a type and is returned unchanged."""
    if isinstance(description, list):
        return GenericAlias(list, _to_type(*description))
    if not isinstance(description, dict):
        return description
    fields = [(name, _to_type(field), msgspec.UNSET) for names, field in description.items() for name in names.split()]
    return msgspec.defstruct("Object", fields)


_LARGEST = 1e18
"""Maximum absolute value of a number in any unit. It keeps sums and products finite."""
_Real = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
_Number, _Text = Integer | _Real, str | None
_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)] | Annotated[float, msgspec.Meta(gt=1e-9, le=1e9)]
_Requests = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
"""A number of requests. It is limited because readers allocate memory for each request; a plan has at most a
million."""
_LateBucket = Annotated[int, msgspec.Meta(ge=-1, le=256)]
"""Index of a lateness bucket (loadgen.engine.client_health): four per octave from 1 us, and -1 for less than 1 us."""
_Bits = Annotated[int, msgspec.Meta(ge=0, le=64)]
"""Bit length of the difference in ns between two timestamps."""
CLOCK = msgspec.defstruct("Clock", [("workers", list[Count]), ("offset_ns", Integer), ("uncertainty_ns", Integer)])
_CARD = {
    "index": int | str,
    "name gap": str,
    "memory_used_bytes busy power_w sm_clock_hz engine_active tensor_active dram_active": _Number,
    "memory_total_bytes": _Number | None,
    "processes": [{"pid": int, "name gap": str, "memory_used_bytes rss_bytes": _Number | None}],
}
_CLIENT = {
    "cpu_ns wall_ns stall_ns_max clock_disagreement_ns sweep_ns_max": Integer,
    "reads coalesced_reads full_reads windows retransmits out_of_order": Count,
    "ring_drops ring_missed ring_rejected ring_given_up socket_rejected users pauses paused_ns": Count,
    "core_wait_ns": Integer,
    "realtime": bool,
    "gateways timing_sources unknown_timing_names": [str],
    "late_counts": dict[_LateBucket, Count],
    "ring_off_counts": dict[_Bits, Count],
}
_SERVER = {
    "running waiting kv_used kv_used_max engines kv_tokens taken_share": _Number,
    "prompt_tokens output_tokens cached_prompt_tokens live_prompt_tokens live_output_tokens": _Number,
    "requests_finished requests_failed preemptions rejections process_start_s": _Number,
    "queue_s_sum prefill_s_sum decode_s_sum inference_s_sum": _Number,
    "queue_s_count prefill_s_count decode_s_count inference_s_count": _Number,
}
_SAMPLED = {
    **_CARD,
    **_CLIENT,
    **_SERVER,
    "replicas": [{"url": str, **_SERVER}],
    "moment": str,
    "took_ns": Integer,
    "simulated": bool,
    "simulated_speed": _Number,
    "gpus": [_CARD],
}
_PLAN = {
    "server url endpoint label arrivals workload platform gpu_model replica_header balance": _Text,
    "more_urls": [str],
    "n": _Requests | None,
    "workers warmup max_in_flight concurrency": Integer | None,
    "repeat repeats": Count,
    "batch_size": Annotated[int, msgspec.Meta(ge=1, le=1 << 32)],
    "duration_s timeout_s": _Number | None,
    "input_tokens output_tokens": int | str | None,
    "audio_seconds": str | None,
    "seed": int,
    "seed_choice": Literal["fixed", "stated", "random"],
    "ignore_eos simulated": bool,
    "window_s": tuple[_Real, _Real] | None,
    "objectives goodput at": [str],
    "confidence": Annotated[float, msgspec.Meta(gt=0, lt=1)] | None,
}
_NICE = Annotated[int, msgspec.Meta(ge=-20, le=19)]
_FACTS = {
    "name version model url endpoint title prompts forced over_limit proxied_to proxy protocol sent_before cold": _Text,
    "simulated exact virtual": bool,
    "speed": _Positive | None,
    "hardware": {
        "gpu model accuracy": str,
        "tensor_parallel gpus": Integer,
        "changes": list[str],
        "saves_work own_gpu": bool,
    },
    "prediction": [{"figure": str, "value low high": _Number}],
    "addresses endpoints": list[str],
    "addresses_unused": dict[str, str],
    "replicas": [{"url": str, "addresses": list[str]}],
    "limits": dict[str, bool | Integer | _Real | str | None] | None,
    "notes": {
        "prompt_piece_tokens truncates_to": Count,
        "ignores_eos counts_inputs": bool,
        "memory_option memory_taken split_endpoint": str,
    },
    "stamps": str,
    "scheduling": {"requested policy refused": str, "nice": _NICE, "autogroup_nice": _NICE | None},
    "machines": [msgspec.defstruct("Machine", [("name", str)], bases=(CLOCK,), kw_only=True)],
    "not_measured": dict[str, str],
    "gpu host": _CARD | {"gpus": [_CARD]},
}
_LOAD = {
    "rate_per_s cv": Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)] | None,
    "clients concurrency": Count,
    "turns": Annotated[int, msgspec.Meta(ge=1, le=1_000)],
}
_STAMPS = {"error_s": Annotated[float, msgspec.Meta(ge=0, le=1_000)] | None}
SAMPLE = _to_type(_SAMPLED)
HEADER = _to_type({"plan": _PLAN, "server client telemetry": _FACTS, "load": _LOAD, "stamps": _STAMPS})
