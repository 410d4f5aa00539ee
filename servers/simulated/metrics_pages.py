"""The /metrics page of each server, under the names that the real one exports. Numbers that it has and we do not are
left out, not invented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servers.simulated.metrics import SECONDS, TOKENS, Labels, family, histogram
from servers.simulated.wire import Site

# Recorded from vLLM 0.32.0 (v1/metrics/loggers.py, v1/metrics/buckets.py).
_VLLM_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_VLLM_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_VLLM_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATIONS = 35
"""TGI and LightLLM: so many bounds, each 1.5 times the one before."""


def bounds(server: str, longest: int) -> Mapping[str, Sequence[float]]:
    """Bucket bounds of every histogram of `server`, for a model of `longest` tokens."""
    if server == "vllm":
        seconds = dict.fromkeys(SECONDS, _VLLM_LATENCY) | {
            "ttft_s": _VLLM_TTFT,
            "itl_s": _VLLM_ITL,
            "tpot_s": _VLLM_ITL,
        }
        return {**seconds, **dict.fromkeys(TOKENS, _one_two_five(longest))}
    shortest = 0.0001 if server == "tgi" else 0.001
    durations = [shortest * 1.5 ** (power + 1) for power in range(_DURATIONS)]
    hundredths = [longest / 100 * (part + 1) for part in range(100)]
    return {**dict.fromkeys(SECONDS, durations), **dict.fromkeys(TOKENS, hundredths)}


def vllm(site: Site) -> str:
    """vLLM 0.32.0: names without `_total` in the code get it at export."""
    metrics, gauges = site.metrics, site.gauges()
    labels = {"engine": "0", "model_name": site.config.model}
    running = sum(stream.count for stream in site.streams)
    prefilled = metrics.prompt_tokens + sum(stream.prompt_tokens for stream in site.streams if stream.count)
    reasons = {name: metrics.by_reason[name] for name in ("stop", "length", "abort", "error", "repetition")}
    rejected = {"max_num_queued_reqs": metrics.refused["overloaded"], "max_num_queued_tokens": 0}
    in_model = {"model_name": site.config.model}
    page = [
        _gauge("vllm:num_requests_running", "Number of requests in model execution batches.", labels, gauges.running),
        _gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels, gauges.waiting),
        family(
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "Number of waiting requests by reason.",
            ({**labels, "reason": "capacity"}, gauges.waiting),
            ({**labels, "reason": "deferred"}, 0),
        ),
        _gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels, gauges.kv_usage),
        _counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in tokens.", labels, prefilled),
        _counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in tokens.", labels, 0),
        _counter("vllm:num_preemptions_total", "Cumulative number of preemptions.", labels, gauges.preemptions),
        _counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", labels, prefilled),
        _counter("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens.", labels, 0),
        _counter(
            "vllm:generation_tokens_total",
            "Number of generation tokens processed.",
            labels,
            metrics.output_tokens + running,
        ),
        family(
            "vllm:request_success_total",
            "counter",
            "Count of successfully processed requests.",
            *(({**labels, "finished_reason": reason}, number) for reason, number in reasons.items()),
        ),
        family(
            "vllm:admission_rejections_total",
            "counter",
            "Requests rejected by admission control.",
            *(({**in_model, "reason": reason}, number) for reason, number in rejected.items()),
        ),
        *_histograms(site, labels, _VLLM_HISTOGRAMS),
    ]
    return "".join(page)


def tgi(site: Site) -> str:
    """TGI 3.3.7. Counters carry no `_total`, and nothing carries a model name."""
    metrics, gauges = site.metrics, site.gauges()
    finished = sum(metrics.by_reason.values()) - metrics.by_reason["abort"]
    failures = {**metrics.refused, "dropped": metrics.by_reason["abort"]}
    page = [
        _gauge("tgi_queue_size", "Current queue size", {}, gauges.waiting),
        _gauge("tgi_batch_current_size", "Current batch size", {}, gauges.running),
        _counter("tgi_request_count", "Total number of requests", {}, metrics.requests),
        _counter("tgi_request_success", "Number of successful requests", {}, finished),
        family(
            "tgi_request_failure",
            "counter",
            "Number of failed requests",
            *(({"err": kind}, number) for kind, number in failures.items() if number),
        ),
        *_histograms(site, {}, _TGI_HISTOGRAMS),
    ]
    return "".join(page)


def lightllm(site: Site) -> str:
    """LightLLM 1.2.0 (server/metrics/metrics.py)."""
    metrics, gauges = site.metrics, site.gauges()
    labels = {"model_name": site.config.model}
    finished = sum(metrics.by_reason.values()) - metrics.by_reason["abort"]
    page = [
        _counter("lightllm_request_count_total", "The total number of requests", labels, metrics.requests),
        _counter("lightllm_request_success_total", "The number of successful requests", labels, finished),
        _counter(
            "lightllm_request_failure_total",
            "The number of failed requests",
            labels,
            sum(metrics.refused.values()),
        ),
        _gauge("lightllm_queue_size", "Queue size", labels, gauges.waiting),
        _gauge("lightllm_batch_current_size", "Current batch size", labels, gauges.running),
        _gauge("lightllm_num_running_reqs", "Number of running requests", labels, gauges.running),
        _gauge("lightllm_batch_pause_size", "The number of pause requests", labels, 0),
        _counter(
            "lightllm_prompt_tokens_total", "Total number of prefill tokens processed", labels, metrics.prompt_tokens
        ),
        _counter(
            "lightllm_generation_tokens_total",
            "Total number of generation tokens processed",
            labels,
            metrics.output_tokens,
        ),
        *_histograms(site, labels, _LIGHTLLM_HISTOGRAMS),
    ]
    return "".join(page)


# Exported name to our name of the histogram and what its HELP line says.
_VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("ttft_s", "Histogram of time to first token in seconds."),
    "vllm:inter_token_latency_seconds": ("itl_s", "Histogram of inter-token latency in seconds."),
    "vllm:request_time_per_output_token_seconds": ("tpot_s", "Histogram of time per output token per request."),
    "vllm:e2e_request_latency_seconds": ("e2e_s", "Histogram of e2e request latency in seconds."),
    "vllm:request_decode_time_seconds": ("decode_s", "Histogram of time spent in DECODE phase for request."),
    "vllm:request_prompt_tokens": ("prompt_tokens", "Number of prefill tokens processed."),
    "vllm:request_generation_tokens": ("output_tokens", "Number of generation tokens processed."),
    "vllm:request_params_max_tokens": ("asked_tokens", "Histogram of the max_tokens request parameter."),
}
_TGI_HISTOGRAMS = {
    "tgi_request_duration": ("e2e_s", "Request duration"),
    "tgi_request_inference_duration": ("e2e_s", "Request inference duration"),
    "tgi_request_mean_time_per_token_duration": ("tpot_s", "Mean time per token per request"),
    "tgi_request_input_length": ("prompt_tokens", "Input token length per request"),
    "tgi_request_generated_tokens": ("output_tokens", "Generated tokens per request"),
    "tgi_request_max_new_tokens": ("asked_tokens", "Maximum new tokens per request"),
}
_LIGHTLLM_HISTOGRAMS = {
    "lightllm_request_first_token_duration": ("ttft_s", "First token time of the request"),
    "lightllm_request_inference_duration": ("e2e_s", "Inference time of the request"),
    "lightllm_request_mean_time_per_token_duration": ("tpot_s", "Per token time of the request"),
    "lightllm_request_input_length": ("prompt_tokens", "Length of the input tokens"),
    "lightllm_request_generated_tokens": ("output_tokens", "Number of generated tokens"),
    "lightllm_request_max_new_tokens": ("asked_tokens", "Max new token"),
}


def _histograms(site: Site, labels: Labels, names: Mapping[str, tuple[str, str]]) -> list[str]:
    return [histogram(name, says, labels, site.metrics.histograms[ours]) for name, (ours, says) in names.items()]


def _counter(name: str, says: str, labels: Labels, value: float) -> str:
    return family(name, "counter", says, (labels, value))


def _gauge(name: str, says: str, labels: Labels, value: float) -> str:
    return family(name, "gauge", says, (labels, value))


def _one_two_five(longest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to the model's length (`build_1_2_5_buckets`)."""
    found = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    return [float(bound) for bound in found if bound <= longest]
