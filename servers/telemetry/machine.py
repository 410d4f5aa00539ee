"""What machines report: their GPUs through NVML or, from elsewhere, through DCGM; memory of host and processes."""

from __future__ import annotations

import importlib
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from servers.calls import Caller
from servers.telemetry import EXTRA, GapError, NotMeasuredError
from servers.telemetry.prometheus import Labels, fetch, load_parser

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


class Nvml:
    """Every GPU that the driver shows. See Source."""

    def __init__(self) -> None:
        """Asked of the driver in this process, as nvidia-smi does. Raises NotMeasuredError where the library, the
        driver or a GPU is missing."""
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise NotMeasuredError(f"nvidia-ml-py is not installed: {EXTRA}") from None
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
        nvml = self._nvml
        found: dict[str, Any] = {"index": index}
        try:
            # The second version tells what the driver keeps for itself from what programs use, as nvidia-smi does.
            if (memory := self._supported(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)) is not None:
                found |= {"memory_used_bytes": int(memory.used), "memory_reserved_bytes": int(memory.reserved)}
            elif (memory := self._supported(nvml.nvmlDeviceGetMemoryInfo, handle)) is not None:
                found["memory_used_bytes"] = int(memory.used)
            if (rates := self._supported(nvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
                found["busy"] = rates.gpu / 100
            if (milliwatts := self._supported(nvml.nvmlDeviceGetPowerUsage, handle)) is not None:
                found["power_w"] = milliwatts / 1000
            if (clock := self._supported(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)) is not None:
                found["sm_clock_hz"] = clock * 1e6
            # By name of version: without one the library raises an error of another kind on drivers before 510.
            for ask in (nvml.nvmlDeviceGetComputeRunningProcesses_v3, nvml.nvmlDeviceGetComputeRunningProcesses_v2):
                if (running := self._supported(ask, handle)) is not None:
                    found["processes"] = [
                        {"pid": each.pid, "memory_used_bytes": each.usedGpuMemory} for each in running
                    ]
                    break
        except nvml.NVMLError as error:
            return {"index": index, "gap": str(error)}
        return found

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
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None


class Dcgm:
    """A DCGM exporter over one kept connection. See Source."""

    def __init__(self, url: str, *, verify: ssl.SSLContext | None) -> None:
        """`url` is the exporter's, with or without `/metrics`. Raises NotMeasuredError without the parser."""
        load_parser()
        parts = urlsplit(url)
        self._path = parts.path if parts.path.strip("/") else "/metrics"
        self._ask = Caller(urlunsplit((parts.scheme, parts.netloc, "", "", "")), None, verify)
        self.facts: dict[str, Any] = {"by": "DCGM", "from": url}

    def read(self, limit_s: float) -> dict[str, Any]:
        """`gpus`, one entry per GPU, or per MIG instance."""
        page = fetch(self._ask, self._path, tuple(name for name, _ in DCGM.values()), limit_s)
        found: dict[str, dict[str, Any]] = {}
        for word, (name, factor) in DCGM.items():
            # Where several pods share a GPU, its lines repeat with other labels and the same figure.
            for labels, value in page.samples.get(name, []):
                found.setdefault(_index(labels), {"index": _index(labels)})[word] = value * factor
        if not found:
            raise GapError(f"{self._path} has none of the DCGM exporter's names")
        if "gpus" not in self.facts:
            labelled = {_index(labels): labels for labels, _ in page.samples.get(DCGM["memory_used_bytes"][0], [])}
            drivers = {driver for labels in labelled.values() if (driver := labels.get("DCGM_FI_DRIVER_VERSION"))}
            self.facts["driver"] = ", ".join(sorted(drivers))
            self.facts["gpus"] = [
                {
                    "index": index,
                    "name": labelled.get(index, {}).get("modelName", ""),
                    "uuid": labelled.get(index, {}).get("UUID", ""),
                    "memory_total_bytes": sum(
                        gpu.get(f"memory_{part}_bytes", 0.0) for part in ("used", "free", "reserved")
                    ),
                }
                for index, gpu in found.items()
            ]
        return {"gpus": list(found.values())}

    def close(self) -> None:
        self._ask.close()


def _index(labels: Labels) -> str:
    """`0`; of a MIG instance `0:3`, because each has its own memory."""
    instance = labels.get("GPU_I_ID")
    return labels.get("gpu", "?") + (f":{instance}" if instance else "")


def on_this_machine(url: str) -> bool:
    """Whether the address behind `url` is one of this machine's: a socket can be bound to it. False when unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


class HostMemory:
    """The host and the processes `pids`. See Source."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """Raises NotMeasuredError where psutil is not installed, or one of the processes does not exist."""
        try:
            self._psutil: Any = importlib.import_module("psutil")
        except ImportError:
            raise NotMeasuredError(f"psutil is not installed: {EXTRA}") from None
        self._pids = tuple(pids)
        if gone := [str(pid) for pid in self._pids if not self._psutil.pid_exists(pid)]:
            raise NotMeasuredError(f"there is no process {', '.join(gone)}")
        self.facts: Mapping[str, Any] = {
            "memory_total_bytes": int(self._psutil.virtual_memory().total),
            "processes": [],
        }
        for pid in self._pids:
            name = ""
            with suppress(self._psutil.Error):
                name = str(self._psutil.Process(pid).name())
            self.facts["processes"].append({"pid": pid, "name": name})

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - reads of /proc: 3 ms, most of it to find descendants
        """`rss_bytes` adds up the resident memory of a process and its descendants: pages that several of
        them share are counted in each."""
        memory = self._psutil.virtual_memory()
        return {
            "memory_used_bytes": int(memory.total - memory.available),
            "processes": [self._tree(pid) for pid in self._pids],
        }

    def close(self) -> None:
        """See Source: nothing is held."""

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
