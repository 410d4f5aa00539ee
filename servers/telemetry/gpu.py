"""GPUs of this machine, asked of the driver in this process through NVML, which is what nvidia-smi uses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from servers.telemetry.source import EXTRA, GapError, NotMeasuredError


class Nvml:
    """Every GPU that the driver shows. See Source."""

    def __init__(self) -> None:
        """Raises NotMeasuredError where the library, the driver or a GPU is missing."""
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise NotMeasuredError(f"nvidia-ml-py is not installed: {EXTRA}") from None
        self._handles: list[Any] = []
        self._open()
        self.facts: Mapping[str, Any] = {
            "by": "NVML",
            "driver": self._asked(self._nvml.nvmlSystemGetDriverVersion) or "",
            "gpus": [self._constant(index, handle) for index, handle in enumerate(self._handles)],
        }

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - the driver answers in milliseconds, or never
        """See Source: `gpus`, one entry each. What one does not support is left out; a lost one is a gap of its own."""
        if not self._handles:
            self._open()
        gpus = [self._figures(index, handle) for index, handle in enumerate(self._handles)]
        gaps = [gpu["gap"] for gpu in gpus if "gap" in gpu]
        if len(gaps) == len(gpus):
            raise GapError(str(gaps[0]))
        return {"gpus": gpus}

    def close(self) -> None:
        """See Source."""
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise NotMeasuredError(f"NVML: {error}") from None
        try:
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            nvml.nvmlShutdown()
            raise NotMeasuredError(f"NVML: {error}") from None
        if not self._handles:
            nvml.nvmlShutdown()
            raise NotMeasuredError("NVML: the driver shows no GPU")

    def _constant(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        memory = self._asked(nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "index": index,
            "name": self._asked(nvml.nvmlDeviceGetName, handle) or "",
            "uuid": self._asked(nvml.nvmlDeviceGetUUID, handle) or "",
            "memory_total_bytes": None if memory is None else int(memory.total),
        }

    def _figures(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        found: dict[str, Any] = {"index": index}
        try:
            found |= self._memory(handle)
            if (rates := self._supported(nvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
                found["busy"] = rates.gpu / 100
            if (milliwatts := self._supported(nvml.nvmlDeviceGetPowerUsage, handle)) is not None:
                found["power_w"] = milliwatts / 1000
            clock = self._supported(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
            if clock is not None:
                found["sm_clock_hz"] = clock * 1e6
            if (processes := self._processes(handle)) is not None:
                found["processes"] = [{"pid": each.pid, "memory_used_bytes": each.usedGpuMemory} for each in processes]
        except nvml.NVMLError as error:
            return {"index": index, "gap": str(error)}
        return found

    def _memory(self, handle: Any) -> dict[str, int]:
        """The second version tells what the driver keeps for itself from what programs use, as nvidia-smi does."""
        nvml = self._nvml
        second = self._supported(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        if second is not None:
            return {"memory_used_bytes": int(second.used), "memory_reserved_bytes": int(second.reserved)}
        first = self._supported(nvml.nvmlDeviceGetMemoryInfo, handle)
        return {} if first is None else {"memory_used_bytes": int(first.used)}

    def _processes(self, handle: Any) -> Any:
        """By name of version: without one the library raises an error of another kind on drivers before 510."""
        newer = self._supported(self._nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if newer is not None:
            return newer
        return self._supported(self._nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)

    def _supported(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """None where this GPU or this driver does not know the question; raises NVMLError for everything else."""
        nvml = self._nvml
        unknown = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
        try:
            return ask(*arguments)
        except nvml.NVMLError as error:
            if error.value in unknown:
                return None
            raise

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """None where there is no answer, for whatever reason."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError:
            return None
