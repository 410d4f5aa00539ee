"""Reads the metrics of servers, GPUs and hosts during a run. The connections for this are separate from the load.

Metrics are read from a `Source` at intervals. A source may fail without failing the run:

    GapError               One reading failed. The time series has a gap, with the reason.
    └── NotMeasuredError   The source cannot be read at all on this machine or server.

A metrics page may contain several samples of one metric. Their labels decide how the samples are combined:

    tp_rank, pp_rank, ...   The ranks of one engine work on the same requests. Only the largest sample counts.
    pid                     Several processes can share one engine. Counters are added, because each process counts its
                            own requests. For a gauge, only the largest sample counts, because an idle process publishes
                            an old value or 0.
    engine, dp_rank, ...    Every other label distinguishes separate parts of the server, so samples are added. For
                            KV-cache use, the mean over the engines and the value of the fullest engine are reported.

Server metrics get common names: running and waiting requests, KV-cache use, tokens, preemptions, rejections. Pages are
fetched with limits on time and size, and parsed with the official prometheus-client parser. Parsing vLLM's page of 55
kB takes 4 ms of CPU once a second, in a process that does not receive tokens. Servers also publish histograms of
durations. Only their sums and counts are read, which give the mean time in the queue, in prefill and in decode.
Percentiles are not read: the buckets are too coarse (vLLM's first bucket ends at 0.3 s), and TGI has no metric for the
time to first token.
"""

from __future__ import annotations

import importlib
import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from loadgen.servers.auth import NO_AUTH, Access
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import MetricNames
from loadgen.servers.errors import DECODE_ERRORS, ServerError
from loadgen.servers.target import split_unix_url

if TYPE_CHECKING:
    import ssl

    from loadgen.servers.json_client import JsonClient
    from loadgen.servers.proxy import Proxy

PAGE_LIMIT_BYTES = 16 << 20
ROUTE_BYTES = 1 << 16  # Maximum size of a JSON response with one value
PROCESS_START = "process_start_time_seconds"
"""Metric with the start time of the server's process in s since 1970. Prometheus clients publish it by default. If
several processes publish it, the latest start time is used."""
ABSENT_STATUSES = (401, 403, 404, 405)  # Statuses of a page that is missing or forbidden, which will not change

Labels = Mapping[str, str]
_WORK = ("prompt_tokens", "output_tokens", "cached_prompt_tokens", "requests_finished", "requests_failed")
_LIVE_WORK = ("live_prompt_tokens", "live_output_tokens")
_PHASES = ("queue", "prefill", "decode", "inference")
PHASE_COUNTERS = tuple(f"{phase}_s_{part}" for phase in _PHASES for part in ("sum", "count"))
"""Sums (in s) and counts of the server's histograms of durations."""
_DRAFTS = ("draft_steps", "draft_tokens", "accepted_draft_tokens")
COUNTERS = frozenset((*_WORK, *_LIVE_WORK, *_DRAFTS, "preemptions", "rejections", *PHASE_COUNTERS))
"""Metrics that grow until the server restarts. Other metrics are gauges."""
SETTINGS = frozenset({"taken_share", "process_start_s"})
"""Values that are not added up over replicas, because a sum makes no sense. The largest value is used instead."""
AVERAGED = frozenset({"kv_used", "acceptance_length", "acceptance_rate"})
"""Metrics that are averaged over engines, which have equal size. Other metrics are added."""
RANK = re.compile(r"(?!dp_rank$)[a-z_]*_rank")
"""Matches labels of ranks that share the model of one engine: tp_rank, pp_rank, moe_ep_rank. A label dp_rank does not
match, because each dp_rank is a separate engine."""
RANK_OR_PROCESS = re.compile(rf"{RANK.pattern}|pid")
"""Matches labels of ranks, and the label `pid` of processes that publish metrics of the same engine."""
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
"""Maps loadgen's name of a value to the exporter's name and a factor that converts its unit (MiB, percent, MHz)."""


class GapError(Exception):
    """One reading of a telemetry source failed. The message is the reason."""

    values: Mapping[str, Any] = {}
    """The values of the replicas that could be read, as `replicas`. Empty if nothing could be read."""


class NotMeasuredError(GapError):
    """A telemetry source cannot be read at all on this machine or server. The message is the reason."""


class Source(Protocol):
    """A telemetry source that is read repeatedly, by one thread at a time.

    Constructors raise NotMeasuredError if a required library or the measured device is missing."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Properties of the source that do not change during the run. They are stored in the header of the run file."""

    def read(self, limit_s: float) -> dict[str, Any]:
        """Return the current values, within about `limit_s` seconds. Raises GapError if the values cannot be read."""

    def close(self) -> None:
        """Close the connections and libraries that the source uses. The next call of `read` opens them again."""


class Page(msgspec.Struct, frozen=True):
    """The parsed content of a Prometheus metrics page."""

    samples: Mapping[str, list[tuple[Labels, float]]]  # Finite values by metric name
    declared: frozenset[str]  # Families with a TYPE line, without `_total`. One without samples has counted nothing.


class ServerMetrics:
    """Reads a server's /metrics page over one persistent connection.

    `url` is the base URL of the server, and `query` is the query string to add to the URL of the page.
    """

    def __init__(self, url: str, server: str, access: Access = NO_AUTH, query: str = "") -> None:
        self._client = _metrics_client(f"{url}?{query}" if query else url, access)
        self._server = server
        self.facts: Mapping[str, Any] = {"from": f"{url}/metrics"}

    def read(self, limit_s: float) -> dict[str, Any]:
        prefixes = tuple(table.prefix for table in metric_tables().values())
        page = _fetch(self._client, "/metrics", (*prefixes, PROCESS_START), limit_s)
        values = page_values(page, self._server)
        metrics = BACKENDS[self._server].metrics
        if metrics and metrics.kv_used:
            path, read_value = metrics.kv_used
            try:
                status, content = self._client.page(path, "application/json", limit_s=limit_s, limit_bytes=ROUTE_BYTES)
                if status != 200:
                    raise ValueError(f"answers {status}")
                values["kv_used"] = read_value(msgspec.json.decode(content))
            except (ServerError, LookupError, TypeError, ValueError, *DECODE_ERRORS) as error:
                values["missing"] = {"kv_used": f"{path}: {error}"}
        return values

    def close(self) -> None:
        self._client.close()


class ReplicaMetrics:
    """Reads the metrics of several replicas at the same time, and adds up their values.

    `by_url` maps the URL of each replica to its metrics. A reading has a list `replicas`, which contains the URL and
    the values of each replica.
    """

    def __init__(self, by_url: Mapping[str, Source]) -> None:
        self._by_url = dict(by_url)
        self.facts: Mapping[str, Any] = {"from": ", ".join(str(source.facts["from"]) for source in by_url.values())}

    def read(self, limit_s: float) -> dict[str, Any]:
        """Read all replicas, and return the sums of their values.

        The entry `replicas` contains the values of each replica. Raises GapError if a replica cannot be read, because a
        sum without this replica would look like a restart of the server. The message names the replicas that could not
        be read. The attribute `values` of the error contains the values of the other replicas. Raises NotMeasuredError
        if none of the replicas can ever be read.
        """

        def read_replica(url: str) -> dict[str, Any] | GapError:
            try:
                return {"url": url, **self._by_url[url].read(limit_s)}
            except GapError as error:
                return type(error)(f"{url}: {error}")

        with ThreadPoolExecutor(len(self._by_url)) as executor:
            results = list(executor.map(read_replica, self._by_url))
        errors = [result for result in results if isinstance(result, GapError)]
        replicas = [result for result in results if not isinstance(result, GapError)]
        if not errors:
            return {**add_up_replicas(replicas), "replicas": replicas}
        never = not replicas and all(isinstance(error, NotMeasuredError) for error in errors)
        failure = (NotMeasuredError if never else GapError)("; ".join(map(str, errors)))
        failure.values = {"replicas": replicas} if replicas else {}
        raise failure from None

    def close(self) -> None:
        for source in self._by_url.values():
            source.close()


def add_up_replicas(replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the values of several replicas into the values of one server.

    - Most values are added. A counter that a replica does not publish yet counts as 0.
    - The values in AVERAGED, such as `kv_used`, are means over all engines of all replicas.
    - For the values in SETTINGS and for `kv_used_max`, the largest value is used.
    """
    names = dict.fromkeys(
        name for values in replicas for name, value in values.items() if isinstance(value, int | float)
    )
    engines = [values.get("engines", 1) for values in replicas]
    result: dict[str, Any] = {}
    for name in names:
        known = [(values[name], number) for values, number in zip(replicas, engines, strict=True) if name in values]
        if name in AVERAGED:
            result[name] = sum(value * number for value, number in known) / sum(number for _, number in known)
        elif name in SETTINGS:
            result[name] = max(value for value, _ in known)
        else:
            result[name] = sum(value for value, _ in known)
    fullest = [values.get("kv_used_max", values.get("kv_used")) for values in replicas]
    if any(value is not None for value in fullest):
        result["kv_used_max"] = max(value for value in fullest if value is not None)
        result["engines"] = sum(engines)
    missing = {name: reason for values in replicas for name, reason in values.get("missing", {}).items()}
    return {**result, "missing": missing} if missing else result


class Dcgm:
    """Reads GPU metrics from a DCGM exporter over one persistent connection.

    `url` is the URL of the exporter, with or without `/metrics`."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None, proxy: Proxy | None = None) -> None:
        parts = urlsplit(url)
        self._path = parts.path if parts.path.strip("/") else "/metrics"
        self._client = _metrics_client(
            urlunsplit((parts.scheme, parts.netloc, "", "", "")), Access(tls=tls, proxy=proxy)
        )
        self.facts: dict[str, Any] = {"by": "DCGM", "from": url}

    def read(self, limit_s: float) -> dict[str, Any]:
        """Return the current values of each GPU or MIG instance, as a list under the key `gpus`."""
        page = _fetch(self._client, self._path, tuple(name for name, _ in DCGM.values()), limit_s)
        gpus: dict[str, dict[str, Any]] = {}
        for value_name, (metric, factor) in DCGM.items():
            # If several pods share a GPU, its samples repeat with other labels and the same value.
            for labels, value in page.samples.get(metric, []):
                gpus.setdefault(_index(labels), {"index": _index(labels)})[value_name] = value * factor
        if not gpus:
            raise GapError(f"{self._path} has no metric of the DCGM exporter")
        if "gpus" not in self.facts:
            self._add_gpu_facts(page, gpus)
        return {"gpus": list(gpus.values())}

    def _add_gpu_facts(self, page: Page, gpus: Mapping[str, Mapping[str, Any]]) -> None:
        labels_by_gpu = {_index(labels): labels for labels, _ in page.samples.get(DCGM["memory_used_bytes"][0], [])}
        drivers = {labels.get("DCGM_FI_DRIVER_VERSION", "") for labels in labels_by_gpu.values()} - {""}
        self.facts["driver"] = ", ".join(sorted(drivers))
        memory_parts = ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")
        self.facts["gpus"] = [
            {
                "index": index,
                "name": labels_by_gpu.get(index, {}).get("modelName", ""),
                "uuid": labels_by_gpu.get(index, {}).get("UUID", ""),
                "memory_total_bytes": sum(gpu.get(part, 0.0) for part in memory_parts),
            }
            for index, gpu in gpus.items()
        ]

    def close(self) -> None:
        self._client.close()


class Nvml:
    """Reads the metrics of every GPU of this machine through NVML, the library that nvidia-smi uses."""

    def __init__(self) -> None:
        self._nvml = _library("pynvml", "nvidia-ml-py")
        self._handles: list[Any] = []
        self._open()
        self.facts: Mapping[str, Any] = {
            "by": "NVML",
            "driver": self._query_or_none(self._nvml.nvmlSystemGetDriverVersion) or "",
            "gpus": [self._gpu_facts(index, handle) for index, handle in enumerate(self._handles)],
        }

    def _gpu_facts(self, index: int, handle: Any) -> dict[str, Any]:
        memory = self._query_or_none(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "index": index,
            "name": self._query_or_none(self._nvml.nvmlDeviceGetName, handle) or "",
            "uuid": self._query_or_none(self._nvml.nvmlDeviceGetUUID, handle) or "",
            "memory_total_bytes": memory and int(memory.total),
        }

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - the driver answers in milliseconds, or never
        """Return the current values of each GPU, as a list under the key `gpus`.

        Values that a GPU does not support are omitted. If a GPU cannot be read, its list entry contains the reason as
        `gap`. Raises GapError if no GPU can be read.
        """
        if not self._handles:
            self._open()
        gpus = [self._read_gpu(index, handle) for index, handle in enumerate(self._handles)]
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

    def _read_gpu(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        values: dict[str, Any] = {"index": index}
        try:
            # The second version separates the driver's own memory from that of programs, as nvidia-smi does.
            memory = self._query(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
            if memory is not None:
                values["memory_used_bytes"] = int(memory.used)
                values["memory_reserved_bytes"] = int(memory.reserved)
            else:
                memory = self._query(nvml.nvmlDeviceGetMemoryInfo, handle)
                if memory is not None:
                    values["memory_used_bytes"] = int(memory.used)
            rates = self._query(nvml.nvmlDeviceGetUtilizationRates, handle)
            if rates is not None:
                values["busy"] = rates.gpu / 100
            milliwatts = self._query(nvml.nvmlDeviceGetPowerUsage, handle)
            if milliwatts is not None:
                values["power_w"] = milliwatts / 1000
            clock_mhz = self._query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
            if clock_mhz is not None:
                values["sm_clock_hz"] = clock_mhz * 1e6
            # The functions are called by version. The unversioned one raises another error on drivers before 510.
            processes = self._query(nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
            if processes is None:
                processes = self._query(nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
            if processes is not None:
                values["processes"] = [
                    {"pid": process.pid, "memory_used_bytes": process.usedGpuMemory} for process in processes
                ]
        except nvml.NVMLError as error:
            return {"index": index, "gap": str(error)}
        return values

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call an NVML function and return its result, or None if the GPU or driver does not support the function.

        Raises NVMLError for every other failure."""
        nvml = self._nvml
        unsupported = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        try:
            return function(*arguments)
        except nvml.NVMLError as error:
            if error.value not in unsupported:
                raise
            return None

    def _query_or_none(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call an NVML function and return its result, or None after any NVMLError."""
        with suppress(self._nvml.NVMLError):
            return function(*arguments)


class HostMemory:
    """Reads the memory use of the host, and of the processes with the ids `pids`."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        psutil = _library("psutil", "psutil")
        self._psutil = psutil
        self._pids = tuple(pids)
        missing = [str(pid) for pid in self._pids if not psutil.pid_exists(pid)]
        if missing:
            raise NotMeasuredError(f"there is no process {', '.join(missing)}")
        self.facts: dict[str, Any] = {"memory_total_bytes": int(self._memory().total), "processes": []}
        for pid in self._pids:
            name = ""
            with suppress(psutil.Error):
                name = str(psutil.Process(pid).name())
            self.facts["processes"].append({"pid": pid, "name": name})

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - reads of /proc: 3 ms, most of it to find descendants
        """Return the memory in use on the host, and the resident memory of each process in `pids`, in bytes.

        The value of a process, `rss_bytes`, includes its descendants. Memory that several of these processes share is
        counted several times."""
        memory = self._memory()
        used_bytes = int(memory.total - memory.available)
        return {"memory_used_bytes": used_bytes, "processes": [self._tree(pid) for pid in self._pids]}

    def close(self) -> None:
        """Do nothing, because this source keeps nothing open."""

    def _memory(self) -> Any:
        """Return the memory of the host as psutil reports it.

        Raises NotMeasuredError if the kernel does not report it, for example because a container has no /proc."""
        try:
            return self._psutil.virtual_memory()
        except (OSError, ValueError, KeyError) as error:
            raise NotMeasuredError(f"the memory of this machine cannot be read: {error}") from None

    def _tree(self, pid: int) -> dict[str, Any]:
        psutil = self._psutil
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
            resident = int(root.memory_info().rss)
        except psutil.Error as error:
            return {"pid": pid, "gap": str(error)}
        for child in family[1:]:
            with suppress(psutil.Error):  # a child that ended since it was listed has no memory
                resident += int(child.memory_info().rss)
        return {"pid": pid, "rss_bytes": resident, "members": len(family)}


def is_this_machine(url: str) -> bool:
    """Return True if the host of `url` is this machine.

    This is always the case for a Unix socket. For any other URL, the function tries to bind a socket to the host's
    address. The result is False if the host name cannot be resolved.
    """
    if split_unix_url(url):
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def parse_page(content: bytes, prefixes: tuple[str, ...] = ("",)) -> Page:
    """Parse the metrics whose names begin with one of the prefixes. Histogram buckets are skipped.

    Lines without one of the prefixes are ignored, even if they are malformed. For example, the DCGM exporter can write
    `ERROR - FAILED TO CONVERT TO STRING` in place of a number. If no line has one of the prefixes, the whole page is
    parsed. Raises GapError if lines with a prefix are malformed, and NotMeasuredError if the page is not in the text
    format of Prometheus."""
    from prometheus_client.parser import text_string_to_metric_families

    selected: list[str] = []
    try:
        lines = content.decode("utf-8").splitlines()
        selected = [
            line for line in lines if line.removeprefix("# TYPE ").startswith(prefixes) and "_bucket{" not in line
        ]
        families = list(text_string_to_metric_families("\n".join(selected or lines)))
    except (ValueError, KeyError, IndexError) as error:
        problem = GapError if selected else NotMeasuredError
        raise problem(f"not in the text format of Prometheus: {str(error)[:200]}") from None
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in families:
        for sample in family.samples:
            if math.isfinite(sample.value):
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    return Page(samples, frozenset(family.name for family in families))


def metric_tables() -> dict[str, MetricNames]:
    """Return the metric names of every server that publishes metrics, by the name of the server."""
    return {backend.name: backend.metrics for backend in BACKENDS.values() if backend.metrics}


def page_values(page: Page, server: str) -> dict[str, Any]:
    """Return the values of a metrics page by loadgen's names, such as `kv_used`.

    Values that are not on the page are omitted. `server` is a key of BACKENDS. A generic OpenAI server has no metric
    names. For such a server, this function uses the names of the backend that has the most names on the page.

    If the server has several engines, most values are sums over the engines. The values in AVERAGED, such as `kv_used`,
    are means. Two values are added: `kv_used_max`, the value of the fullest engine, and `engines`, the number of
    engines.
    """
    table = BACKENDS[server].metrics
    if table is None:

        def names_on_page(metrics: MetricNames) -> int:
            return sum(_name_on_page(page, names) is not None for names in metrics.names.values())

        table = max(metric_tables().values(), key=names_on_page)
    by_engine: dict[str, list[float]] = {}
    for value_name, names in table.names.items():
        engine_values = _values_by_engine(page, value_name, names)
        if engine_values is not None:
            by_engine[value_name] = engine_values
    values: dict[str, Any] = {
        value_name: fmean(engine_values) if value_name in AVERAGED else sum(engine_values)
        for value_name, engine_values in by_engine.items()
    }
    kv_used = by_engine.get("kv_used", [])
    if len(kv_used) > 1:
        values["kv_used_max"] = max(kv_used)
        values["engines"] = len(kv_used)
    for metrics in metric_tables().values():
        if metrics.labels:
            name, read_labels = metrics.labels
            values |= read_labels(_engine_labels([labels for labels, _ in page.samples.get(name, [])]))
    starts_s = [start_s for _, start_s in page.samples.get(PROCESS_START, [])]
    if starts_s:
        values["process_start_s"] = max(starts_s)
    return values


def _library(module: str, package: str) -> Any:
    """Import `module` on first use, so that commands without telemetry start faster.

    `package` is the name under which pip installs the module. Raises NotMeasuredError if the module is not installed,
    for example after `pip install --no-deps`.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise NotMeasuredError(f"{package} is not installed: pip install {package}") from None


def _metrics_client(url: str, access: Access) -> JsonClient:
    """Return an HTTP client with which `_fetch` can fetch metrics pages.

    This function also imports the parser of metrics pages. The import takes 0.1 s and must not delay the first reading.
    """
    from loadgen.servers.json_client import JsonClient

    _library("prometheus_client.parser", "prometheus-client")
    return JsonClient(url, access)


def _fetch(client: JsonClient, path: str, prefixes: tuple[str, ...], limit_s: float) -> Page:
    """Fetch the page at `path`, and return its metrics whose names begin with one of the prefixes.

    The content type of the page is ignored, because LightLLM sends none. Raises NotMeasuredError if the page is missing
    or forbidden, and GapError if the request fails for another reason."""
    try:
        status, content = client.page(path, "text/plain;version=0.0.4", limit_s=limit_s, limit_bytes=PAGE_LIMIT_BYTES)
    except ServerError as error:
        raise GapError(str(error)) from None
    if status != 200:
        problem = NotMeasuredError if status in ABSENT_STATUSES else GapError
        raise problem(f"{path} answers {status}")
    return parse_page(content, prefixes)


def _values_by_engine(page: Page, value_name: str, names: Sequence[str]) -> list[float] | None:
    """Return the values of one metric, usually one value per engine. Return None if the page has no such metric.

    `value_name` is loadgen's name for the metric. `names` lists the names that the metric can have on the page, and the
    first name that is on the page is used.

    The page may contain several samples for one engine. The module's docstring explains how they are combined:

    - If the samples come from several ranks of the engine, only the largest sample counts.
    - If they come from several processes, a counter has one value per process. For a gauge, only the largest sample
      counts.

    A counter that is declared on the page but has no sample has the value 0.
    """
    metric = _name_on_page(page, names)
    if metric is None:
        return None
    name, _, rest = metric.partition("{")  # `name{label=a|b}`: the accepted values of each label
    pairs = [pair.partition("=") for pair in rest.removesuffix("}").split(",") if pair]
    accepted = {label: values.split("|") for label, _, values in pairs}
    samples = [
        (labels, value)
        for labels, value in _samples(page, name)
        if all(labels.get(label) in values for label, values in accepted.items())
    ]
    if not samples:
        return [0.0] if value_name in COUNTERS else None  # a declared counter without a sample has counted nothing
    repeating_labels = RANK if value_name in COUNTERS else RANK_OR_PROCESS
    largest: dict[frozenset[tuple[str, str]], float] = {}
    for labels, value in samples:
        key = _without(labels, repeating_labels)
        largest[key] = max(largest.get(key, value), value)
    return list(largest.values())


def _without(labels: Labels, names: re.Pattern[str]) -> frozenset[tuple[str, str]]:
    """Return the labels of a sample, except those whose names match the pattern `names`."""
    return frozenset((name, value) for name, value in labels.items() if not names.fullmatch(name))


def _engine_labels(samples: Sequence[Labels]) -> list[Labels]:
    """Return the labels that identify each engine, in the order in which the engines first occur on the page.

    `samples` contains the labels of every sample of one metric. Labels that name a rank or a process are left out,
    because one engine can have several ranks and processes.
    """
    return [dict(labels) for labels in dict.fromkeys(_without(labels, RANK_OR_PROCESS) for labels in samples)]


def _name_on_page(page: Page, names: Sequence[str]) -> str | None:
    """Return the first name in `names` that the page has, or None if the page has none of them.

    The page has a name if it contains a sample of this name, or a TYPE declaration. A declaration is sufficient,
    because a counter may get its first sample later, and the result must not change between two readings.
    """
    for candidate in names:
        name = candidate.partition("{")[0]
        if _samples(page, name) or name.removesuffix("_total").removesuffix("_sum") in page.declared:
            return candidate
    return None


def _samples(page: Page, name: str) -> list[tuple[Labels, float]]:
    """Return the samples of a metric on the page. The name may lack the suffix `_total`.

    The parser adds this suffix to every counter, even if the server publishes the counter without it, as TGI does."""
    return page.samples.get(name) or page.samples.get(f"{name}_total") or []


def _index(labels: Labels) -> str:
    """Return the index of a GPU, such as `0`, or of a MIG instance, such as `0:3`.

    MIG instances are listed separately, because each instance has its own memory."""
    instance = labels.get("GPU_I_ID")
    return labels.get("gpu", "?") + (f":{instance}" if instance else "")
