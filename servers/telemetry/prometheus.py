"""Each server's own /metrics in one vocabulary: what runs and waits, KV-cache use, tokens, preemptions, rejections.

Only what explains a client's figures is read. Latencies are not: the servers' buckets are too coarse (vLLM's first ends
at 0.3 s), and TGI counts no time to first token at all.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from servers.calls import Caller
from servers.errors import ServerError
from servers.telemetry.exposition import Labels, Page, fetch, parser
from servers.telemetry.source import GapError

Names = Mapping[str, tuple[str, ...]]
"""Word to the names a server has had for it, newest first. `name{label=a|b}` takes only samples with such a label."""

VLLM: Names = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "output_tokens": ("vllm:generation_tokens_total",),
    "cached_prompt_tokens": (
        "vllm:prompt_tokens_cached_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
    "preemptions": ("vllm:num_preemptions_total",),
    "rejections": ("vllm:admission_rejections_total",),
    "requests_finished": ("vllm:request_success_total{finished_reason=stop|length|repetition}",),
    "requests_failed": ("vllm:request_success_total{finished_reason=abort|error}",),
}
TGI: Names = {
    "running": ("tgi_batch_current_size",),
    "waiting": ("tgi_queue_size",),
    "prompt_tokens": ("tgi_request_input_length_sum",),
    "output_tokens": ("tgi_request_generated_tokens_sum",),
    "rejections": ("tgi_request_failure{err=overloaded}",),
    "requests_finished": ("tgi_request_success",),
    "requests_failed": ("tgi_request_failure{err=validation|generation|incomplete|dropped|template}",),
}
LIGHTLLM: Names = {
    "running": ("lightllm_batch_current_size", "lightllm_num_running_reqs"),
    "waiting": ("lightllm_queue_size",),
    "paused": ("lightllm_batch_pause_size",),
    "prompt_tokens": ("lightllm_prompt_tokens_total", "lightllm_request_input_length_sum"),
    "output_tokens": ("lightllm_generation_tokens_total", "lightllm_request_generated_tokens_sum"),
    "requests_finished": ("lightllm_request_success_total",),
    "requests_failed": ("lightllm_request_failure_total",),
}
SGLANG: Names = {
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "kv_used": ("sglang:token_usage",),
    "prompt_tokens": ("sglang:prompt_tokens_total",),
    "output_tokens": ("sglang:generation_tokens_total",),
    "cached_prompt_tokens": ("sglang:cached_tokens_total",),
}
SERVERS: Mapping[str, Names] = {"vllm": VLLM, "tgi": TGI, "lightllm": LIGHTLLM, "sglang": SGLANG}
"""A generic OpenAI server is read by the table whose names are on its page."""

PREFIXES = ("vllm:", "tgi_", "lightllm_", "sglang:")
COUNTERS = frozenset(
    {
        *("prompt_tokens", "output_tokens", "cached_prompt_tokens"),
        *("preemptions", "rejections", "requests_finished", "requests_failed"),
    }
)
"""Words that only grow, until the server is started anew. The others are gauges."""
AVERAGED = frozenset({"kv_used"})
"""Shares: of several engines behind one page, which are equal in size, the mean. Everything else is a sum."""
TOKEN_LOAD_LIMIT_BYTES = 1 << 16


class ServerMetrics:
    """A server's /metrics, and LightLLM's /token_load, over one kept connection. See Source."""

    def __init__(self, url: str, server: str, *, api_key: str | None, verify: ssl.SSLContext | bool) -> None:
        """`url` is the base of the server's paths. Raises NotMeasuredError where the parser is not installed."""
        parser()
        self._ask = Caller(url, api_key, verify)
        self._server = server
        self.facts: Mapping[str, Any] = {"from": f"{url}/metrics"}

    def read(self, limit_s: float) -> dict[str, Any]:
        """See Source."""
        page = fetch(self._ask, "/metrics", PREFIXES, limit_s)
        values = values_of(page, self._server)
        if self._server == "lightllm":
            try:
                values["kv_used"] = self._token_load(limit_s)
            except GapError as gap:
                values["missing"] = {"kv_used": str(gap)}
        return values

    def close(self) -> None:
        """See Source."""
        self._ask.close()

    def _token_load(self, limit_s: float) -> float:
        """LightLLM has no gauge for its KV cache on the page; this route gives one share, or a list
        of them where it runs several data-parallel copies."""
        try:
            status, content = self._ask.page(
                "/token_load", "application/json", limit_s=limit_s, limit_bytes=TOKEN_LOAD_LIMIT_BYTES
            )
            load = msgspec.json.decode(content)["current_load"] if status == 200 else None
        except (ServerError, msgspec.DecodeError, KeyError, TypeError) as error:
            raise GapError(f"/token_load: {error}") from None
        each = load if isinstance(load, list) else [load]
        if not each or not all(isinstance(share, int | float) for share in each):
            raise GapError(f"/token_load answers {status} and no current_load")
        return float(sum(each) / len(each))


def values_of(page: Page, server: str) -> dict[str, Any]:
    """The page in our words; a word that the page does not have is left out. `server` is a key of probe.TITLES."""
    names = SERVERS.get(server) or _likely(page)
    found = {word: value for word, each in names.items() if (value := _value(page, word, each)) is not None}
    return {**found, **_cache_config(page)}


def _likely(page: Page) -> Names:
    """The table with the most names on the page."""
    return max(SERVERS.values(), key=lambda names: sum(_present(page, each) is not None for each in names.values()))


def _value(page: Page, word: str, names: Sequence[str]) -> float | None:
    named = _present(page, names)
    if named is None:
        return None
    name, wanted = _parts(named)
    values = [value for labels, value in _samples(page, name) if _fits(labels, wanted)]
    if not values:
        return 0.0 if word in COUNTERS else None  # declared and without a sample: nothing was counted yet
    return sum(values) / len(values) if word in AVERAGED else sum(values)


def _present(page: Page, names: Sequence[str]) -> str | None:
    """The first name that the page knows, with samples or only declared.

    Declared must do: between two readings a counter may get its first sample, and must not change its meaning then.
    """
    return next((each for each in names if _known(page, _parts(each)[0])), None)


def _known(page: Page, name: str) -> bool:
    return bool(_samples(page, name)) or name.removesuffix("_total").removesuffix("_sum") in page.declared


def _samples(page: Page, name: str) -> list[tuple[Labels, float]]:
    """The parser gives every counter its `_total`, also TGI's, which have none on the page."""
    return page.samples.get(name) or page.samples.get(f"{name}_total") or []


def _parts(named: str) -> tuple[str, dict[str, frozenset[str]]]:
    """`name{label=a|b}` as the name and what each label may be."""
    name, _, rest = named.partition("{")
    pairs = (pair.partition("=") for pair in rest.removesuffix("}").split(",") if pair)
    return name, {label: frozenset(values.split("|")) for label, _, values in pairs}


def _fits(labels: Labels, wanted: Mapping[str, frozenset[str]]) -> bool:
    return all(labels.get(label) in values for label, values in wanted.items())


def _cache_config(page: Page) -> dict[str, float]:
    """What vLLM says about its KV cache in the labels of `vllm:cache_config_info`: the tokens that fit into it, over
    all engines, and the share of each card that was taken at the start."""
    found: dict[str, float] = {}
    for labels, _ in page.samples.get("vllm:cache_config_info", []):
        size = _number(labels, "kv_cache_size_tokens")
        blocks, block = _number(labels, "num_gpu_blocks"), _number(labels, "block_size")
        if size is None and blocks is not None and block is not None:
            size = blocks * block
        if size is not None:
            found["kv_tokens"] = found.get("kv_tokens", 0.0) + size
        if (share := _number(labels, "gpu_memory_utilization")) is not None:
            found["taken_share"] = share
    return found


def _number(labels: Labels, name: str) -> float | None:
    """vLLM writes Python's words into labels: `16384`, `0.92` or `None`."""
    try:
        return float(labels[name])
    except (KeyError, ValueError):
        return None
