"""What servers, GPUs and hosts report about themselves while a run is on: beside the load, never in its path.

A Source is read now and then, and can fail without failing the run:

GapError               one reading failed: a gap in the curve, with its reason
└── NotMeasuredError   it cannot be read here at all

A page may hold several samples of one metric. Their labels say whether they are the same figure again:

    tp_rank, pp_rank, ...   ranks of one engine work on the same requests: the largest sample counts once
    pid                     processes in front of one engine: as a gauge each publishes what it last heard of the
                            engine, and an idle one an old figure or 0, so the largest sample counts; as a counter each
                            counts its own requests, so they are added
    engine, dp_rank, ...    every other label stands for something of its own: samples are added, and of the KV cache's
                            use both the mean over the engines and that of the fullest engine are kept

Servers' own /metrics are read in one vocabulary: what runs and waits, KV-cache use, tokens, preemptions, rejections.
Pages are fetched within limits and read by the official parser of prometheus-client: of vLLM's page of 55 kB that takes
4 ms of processor time, once a second, in a process that no token passes through. Only what explains a client's figures
is read. Latencies are not: the servers' buckets are too coarse (vLLM's first ends at 0.3 s), and TGI counts no time to
first token at all.
"""

from __future__ import annotations

import importlib
import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from loadgen.servers.auth import NO_AUTH, Access
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import MetricNames
from loadgen.servers.errors import DECODE_ERRORS, ServerError

if TYPE_CHECKING:
    import ssl

    from loadgen.servers.json_client import JsonClient

EXTRA = "pip install 'llm-loadgen[telemetry]'"  # What to do where a library is missing
PAGE_LIMIT_BYTES = 16 << 20
ROUTE_BYTES = 1 << 16  # Of a route whose JSON has one figure
ABSENT_STATUSES = (401, 403, 404, 405)  # Statuses that say: not for you, or not here. They will say so again.

Labels = Mapping[str, str]
_WORK = ("prompt_tokens", "output_tokens", "cached_prompt_tokens", "requests_finished", "requests_failed")
COUNTERS = frozenset((*_WORK, "preemptions", "rejections"))  # Grow until the server starts anew; others are gauges
AVERAGED = frozenset({"kv_used"})  # Of several engines, which are equal in size, the mean; else the sum
RANK = re.compile(r"(?!dp_rank$)[a-z_]*_rank")
"""Labels of the ranks that share one engine's model: tp_rank, pp_rank, moe_ep_rank, ... A dp_rank is an engine."""
RANK_OR_PROCESS = re.compile(rf"{RANK.pattern}|pid")
"""The same, and the label of processes that publish figures of one engine."""
MIB = 1 << 20
DCGM: Mapping[str, tuple[str, float]] = {
    "memory_used_bytes": ("DCGM_FI_DEV_FB_USED", MIB),
    "memory_free_bytes": ("DCGM_FI_DEV_FB_FREE", MIB),
    "memory_reserved_bytes": ("DCGM_FI_DEV_FB_RESERVED", MIB),
    "busy": ("DCGM_FI_DEV_GPU_UTIL", 0.01),
    "power_w": ("DCGM_FI_DEV_POWER_USAGE", 1.0),
    "sm_clock_hz": ("DCGM_FI_DEV_SM_CLOCK", 1e6),
    "memory_clock_hz": ("DCGM_FI_DEV_MEM_CLOCK", 1e6),
    "engine_active": ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 1.0),
    "tensor_active": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1.0),
    "dram_active": ("DCGM_FI_PROF_DRAM_ACTIVE", 1.0),
}
"""Word to the exporter's name, and what its figure is multiplied with: MiB, percent, MHz."""


class GapError(Exception):
    """One reading failed; the message is the reason."""


class NotMeasuredError(GapError):
    """Nothing can be read here at all; the message is the reason."""


class Source(Protocol):
    """One thing that is read again and again, by one thread at a time. Making one raises NotMeasuredError where a
    library, or what it reads, is missing."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What stays the same during the run: for the header."""

    def read(self, limit_s: float) -> dict[str, Any]:
        """The values of this moment. May take `limit_s`, roughly. Raises GapError."""

    def close(self) -> None:
        """Let go of connections and libraries; `read` opens them again."""


class Page(msgspec.Struct, frozen=True):
    """What a page holds."""

    samples: Mapping[str, list[tuple[Labels, float]]]  # By the name on the page; values that are finite
    declared: frozenset[str]  # Families with a TYPE line, without `_total`; one without samples has counted nothing


class ServerMetrics:
    """A server's /metrics, over one kept connection. `url` is the base of the server's paths."""

    def __init__(self, url: str, server: str, access: Access = NO_AUTH) -> None:
        self._ask = _page_caller(url, access)
        self._server = server
        self.facts: Mapping[str, Any] = {"from": f"{url}/metrics"}

    def read(self, limit_s: float) -> dict[str, Any]:
        page = _fetch(self._ask, "/metrics", tuple(table.prefix for table in metric_tables().values()), limit_s)
        values = page_values(page, self._server)
        metrics = BACKENDS[self._server].metrics
        if metrics and metrics.kv_used:
            path, of = metrics.kv_used
            try:
                status, content = self._ask.page(path, "application/json", limit_s=limit_s, limit_bytes=ROUTE_BYTES)
                if status != 200:
                    raise ValueError(f"answers {status}")
                values["kv_used"] = of(msgspec.json.decode(content))
            except (ServerError, LookupError, TypeError, ValueError, *DECODE_ERRORS) as error:
                values["missing"] = {"kv_used": f"{path}: {error}"}
        return values

    def close(self) -> None:
        self._ask.close()


class Dcgm:
    """A DCGM exporter over one kept connection. `url` is the exporter's, with or without `/metrics`."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._path = parts.path if parts.path.strip("/") else "/metrics"
        self._ask = _page_caller(urlunsplit((parts.scheme, parts.netloc, "", "", "")), Access(tls=tls))
        self.facts: dict[str, Any] = {"by": "DCGM", "from": url}

    def read(self, limit_s: float) -> dict[str, Any]:
        """`gpus`, one entry per GPU, or per MIG instance."""
        page = _fetch(self._ask, self._path, tuple(name for name, _ in DCGM.values()), limit_s)
        result: dict[str, dict[str, Any]] = {}
        for word, (name, factor) in DCGM.items():
            # Where several pods share a GPU, its lines repeat with other labels and the same figure.
            for labels, value in page.samples.get(name, []):
                result.setdefault(_index(labels), {"index": _index(labels)})[word] = value * factor
        if not result:
            raise GapError(f"{self._path} has none of the DCGM exporter's names")
        if "gpus" not in self.facts:
            labelled = {_index(labels): labels for labels, _ in page.samples.get(DCGM["memory_used_bytes"][0], [])}
            drivers = {driver for labels in labelled.values() if (driver := labels.get("DCGM_FI_DRIVER_VERSION"))}
            self.facts["driver"] = ", ".join(sorted(drivers))
            parts = [f"memory_{part}_bytes" for part in ("used", "free", "reserved")]
            self.facts["gpus"] = [
                {
                    "index": index,
                    "name": labelled.get(index, {}).get("modelName", ""),
                    "uuid": labelled.get(index, {}).get("UUID", ""),
                    "memory_total_bytes": sum(gpu.get(part, 0.0) for part in parts),
                }
                for index, gpu in result.items()
            ]
        return {"gpus": list(result.values())}

    def close(self) -> None:
        self._ask.close()


class Nvml:
    """Every GPU that the driver shows, asked of the driver in this process, as nvidia-smi does."""

    def __init__(self) -> None:
        self._nvml = _library("pynvml", "nvidia-ml-py")
        self._handles: list[Any] = []
        self._open()
        self.facts: Mapping[str, Any] = {
            "by": "NVML",
            "driver": self._asked(self._nvml.nvmlSystemGetDriverVersion) or "",
            "gpus": [
                {
                    "index": index,
                    "name": self._asked(self._nvml.nvmlDeviceGetName, handle) or "",
                    "uuid": self._asked(self._nvml.nvmlDeviceGetUUID, handle) or "",
                    "memory_total_bytes": memory and int(memory.total),
                }
                for index, handle in enumerate(self._handles)
                for memory in [self._asked(self._nvml.nvmlDeviceGetMemoryInfo, handle)]
            ],
        }

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - the driver answers in milliseconds, or never
        """`gpus`, one entry each. What one does not support is left out; a lost one is a gap of its own."""
        if not self._handles:
            self._open()
        gpus = [self._figures(index, handle) for index, handle in enumerate(self._handles)]
        gaps = [gpu["gap"] for gpu in gpus if "gap" in gpu]
        if len(gaps) == len(gpus):
            raise GapError(str(gaps[0]))
        return {"gpus": gpus}

    def close(self) -> None:
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            finally:
                if not self._handles:
                    nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            raise NotMeasuredError(f"NVML: {error}") from None
        if not self._handles:
            raise NotMeasuredError("NVML: the driver shows no GPU")

    def _figures(self, index: int, handle: Any) -> dict[str, Any]:
        nvml, ask = self._nvml, self._supported
        result: dict[str, Any] = {"index": index}
        try:
            # The second version tells what the driver keeps for itself from what programs use, as nvidia-smi does.
            if (memory := ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)) is not None:
                result |= {"memory_used_bytes": int(memory.used), "memory_reserved_bytes": int(memory.reserved)}
            elif (memory := ask(nvml.nvmlDeviceGetMemoryInfo, handle)) is not None:
                result["memory_used_bytes"] = int(memory.used)
            if (rates := ask(nvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
                result["busy"] = rates.gpu / 100
            if (milliwatts := ask(nvml.nvmlDeviceGetPowerUsage, handle)) is not None:
                result["power_w"] = milliwatts / 1000
            if (clock := ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)) is not None:
                result["sm_clock_hz"] = clock * 1e6
            # By name of version: without one the library raises an error of another kind on drivers before 510.
            running = ask(nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
            if running is None:
                running = ask(nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
            if running is not None:
                result["processes"] = [{"pid": each.pid, "memory_used_bytes": each.usedGpuMemory} for each in running]
        except nvml.NVMLError as error:
            return {"index": index, "gap": str(error)}
        return result

    def _supported(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """None where this GPU or this driver does not know the question; raises NVMLError for everything else."""
        nvml = self._nvml
        unknown = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        try:
            return ask(*arguments)
        except nvml.NVMLError as error:
            if error.value not in unknown:
                raise
            return None

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """None where there is no answer, for whatever reason."""
        with suppress(self._nvml.NVMLError):
            return ask(*arguments)


class HostMemory:
    """The host's memory, and that of the processes `pids`."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._psutil = psutil = _library("psutil", "psutil")
        self._pids = tuple(pids)
        if gone := [str(pid) for pid in self._pids if not psutil.pid_exists(pid)]:
            raise NotMeasuredError(f"there is no process {', '.join(gone)}")
        self.facts: dict[str, Any] = {"memory_total_bytes": int(psutil.virtual_memory().total), "processes": []}
        for pid in self._pids:
            name = ""
            with suppress(psutil.Error):
                name = str(psutil.Process(pid).name())
            self.facts["processes"].append({"pid": pid, "name": name})

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - reads of /proc: 3 ms, most of it to find descendants
        """`rss_bytes` adds up the resident memory of a process and its descendants: pages that several of
        them share are counted in each."""
        memory = self._psutil.virtual_memory()
        used_bytes = int(memory.total - memory.available)
        return {"memory_used_bytes": used_bytes, "processes": [self._tree(pid) for pid in self._pids]}

    def close(self) -> None:
        """Nothing is held."""

    def _tree(self, pid: int) -> dict[str, Any]:
        psutil = self._psutil
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
            resident = int(root.memory_info().rss)
        except psutil.Error as error:
            return {"pid": pid, "gap": str(error)}
        for child in family[1:]:
            with suppress(psutil.Error):  # it may have ended since it was listed, and has no memory any more
                resident += int(child.memory_info().rss)
        return {"pid": pid, "rss_bytes": resident, "members": len(family)}


def is_this_machine(url: str) -> bool:
    """Whether the address behind `url` is one of this machine's: a socket can be bound to it. False when unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def parse_page(content: bytes, ours: tuple[str, ...] = ("",)) -> Page:
    """Read what begins with one of `ours`, without the buckets of histograms. Raises GapError when that is not in the
    format, and NotMeasuredError for a page of another kind. Other people's lines are not looked at: the DCGM exporter
    has been seen to write `ERROR - FAILED TO CONVERT TO STRING` where a number belongs. Only a page with nothing of
    ours is read as a whole, to tell it from no page at all."""
    from prometheus_client.parser import text_string_to_metric_families

    chosen: list[str] = []
    try:
        lines = content.decode("utf-8").splitlines()
        chosen = [line for line in lines if line.removeprefix("# TYPE ").startswith(ours) and "_bucket{" not in line]
        families = list(text_string_to_metric_families("\n".join(chosen or lines)))
    except (ValueError, KeyError, IndexError) as error:
        raise (GapError if chosen else NotMeasuredError)(
            f"not in the text format of Prometheus: {str(error)[:200]}"
        ) from None
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in families:
        for sample in family.samples:
            if math.isfinite(sample.value):
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    return Page(samples, frozenset(family.name for family in families))


def metric_tables() -> dict[str, MetricNames]:
    """The names of every server that has some, by whose they are. A generic OpenAI server is read by the table whose
    names are on its page."""
    return {each.owner or kind.name: each for kind in BACKENDS.values() if (each := kind.metrics)}


def page_values(page: Page, server: str) -> dict[str, Any]:
    """Return the figures of the page in our words, without words that the page does not have.

    `server` is a key of KINDS. With several engines `kv_used` is their mean, `kv_used_max` that of the fullest engine,
    and `engines` their number.
    """
    known = BACKENDS[server].metrics
    if known is None or known.owner:

        def present(metrics: MetricNames) -> int:
            return sum(_present(page, name) is not None for name in metrics.names.values())

        known = max(metric_tables().values(), key=present)
    figures = {word: each for word, names in known.names.items() if (each := _by_engine(page, word, names)) is not None}
    values = {word: fmean(each) if word in AVERAGED else sum(each) for word, each in figures.items()}
    if len(shares := figures.get("kv_used", [])) > 1:
        values |= {"kv_used_max": max(shares), "engines": len(shares)}
    for metrics in metric_tables().values():
        if metrics.labels:
            name, read = metrics.labels
            values |= read(_distinct([labels for labels, _ in page.samples.get(name, [])]))
    return values


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise NotMeasuredError(f"{package} is not installed: {EXTRA}") from None


def _page_caller(url: str, access: Access) -> JsonClient:
    """What `_fetch` asks. The parser is loaded too (0.1 s, once), before anything is timed."""
    from loadgen.servers.json_client import JsonClient

    _library("prometheus_client.parser", "prometheus-client")
    return JsonClient(url, access)


def _fetch(ask: JsonClient, path: str, ours: tuple[str, ...], limit_s: float) -> Page:
    """The page at `path`: what on it begins with one of `ours`. The content type does not matter: LightLLM sends none.
    Raises GapError, and NotMeasuredError where there is no such page."""
    try:
        status, content = ask.page(path, "text/plain;version=0.0.4", limit_s=limit_s, limit_bytes=PAGE_LIMIT_BYTES)
    except ServerError as error:
        raise GapError(str(error)) from None
    if status != 200:
        raise (NotMeasuredError if status in ABSENT_STATUSES else GapError)(f"{path} answers {status}")
    return parse_page(content, ours)


def _by_engine(page: Page, word: str, names: Sequence[str]) -> list[float] | None:
    """Return the figures of this word, one for each set of labels that stands for itself (see the module's docstring);
    None where the page does not have the word."""
    named = _present(page, names)
    if named is None:
        return None
    name, _, rest = named.partition("{")  # `name{label=a|b}`: what each label may be
    pairs = [pair.partition("=") for pair in rest.removesuffix("}").split(",") if pair]
    wanted = {label: values.split("|") for label, _, values in pairs}
    samples = [
        (labels, value)
        for labels, value in _samples(page, name)
        if all(labels.get(label) in allowed for label, allowed in wanted.items())
    ]
    if not samples:
        return [0.0] if word in COUNTERS else None  # declared and without a sample: nothing was counted yet
    repeated = RANK if word in COUNTERS else RANK_OR_PROCESS
    largest: dict[frozenset[tuple[str, str]], float] = {}
    for labels, value in samples:
        key = _without(labels, repeated)
        largest[key] = max(largest.get(key, value), value)
    return list(largest.values())


def _without(labels: Labels, repeated: re.Pattern[str]) -> frozenset[tuple[str, str]]:
    """Return the labels whose names do not match."""
    return frozenset((name, value) for name, value in labels.items() if not repeated.fullmatch(name))


def _distinct(samples: Sequence[Labels]) -> list[Labels]:
    """Return one set of labels for each engine, in their order, without those of ranks and processes."""
    return [dict(fromkey) for fromkey in dict.fromkeys(_without(labels, RANK_OR_PROCESS) for labels in samples)]


def _present(page: Page, names: Sequence[str]) -> str | None:
    """The first name that the page knows, with samples or only declared. Declared must do: between two readings a
    counter may get its first sample, and must not change its meaning then."""
    for each in names:
        name = each.partition("{")[0]
        if _samples(page, name) or name.removesuffix("_total").removesuffix("_sum") in page.declared:
            return each
    return None


def _samples(page: Page, name: str) -> list[tuple[Labels, float]]:
    """The parser gives every counter its `_total`, also TGI's, which have none on the page."""
    return page.samples.get(name) or page.samples.get(f"{name}_total") or []


def _index(labels: Labels) -> str:
    """`0`; of a MIG instance `0:3`, because each has its own memory."""
    instance = labels.get("GPU_I_ID")
    return labels.get("gpu", "?") + (f":{instance}" if instance else "")
