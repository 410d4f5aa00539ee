"""GPUs of another machine, as NVIDIA's DCGM exporter publishes them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from servers.calls import Caller
from servers.telemetry.exposition import Labels, Page, fetch, parser
from servers.telemetry.source import GapError

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


class Dcgm:
    """A DCGM exporter over one kept connection. See Source."""

    def __init__(self, url: str, *, verify: ssl.SSLContext | bool) -> None:
        """`url` is the exporter's, with or without `/metrics`. Raises NotMeasuredError without the parser."""
        parser()
        parts = urlsplit(url)
        self._path = parts.path if parts.path.strip("/") else "/metrics"
        self._ask = Caller(urlunsplit((parts.scheme, parts.netloc, "", "", "")), None, verify)
        self.facts: dict[str, Any] = {"by": "DCGM", "from": url}

    def read(self, limit_s: float) -> dict[str, Any]:
        """See Source: `gpus`, one entry per GPU, or per MIG instance."""
        page = fetch(self._ask, self._path, tuple(name for name, _ in DCGM.values()), limit_s)
        found = _gpus(page)
        if not found:
            raise GapError(f"{self._path} has none of the DCGM exporter's names")
        if "gpus" not in self.facts:
            self.facts |= _constant(page, found)
        return {"gpus": list(found.values())}

    def close(self) -> None:
        """See Source."""
        self._ask.close()


def _gpus(page: Page) -> dict[str, dict[str, Any]]:
    """By index. Where several pods share a GPU, its lines repeat with other labels and the same figure."""
    found: dict[str, dict[str, Any]] = {}
    for word, (name, factor) in DCGM.items():
        for labels, value in page.samples.get(name, []):
            found.setdefault(_index(labels), {"index": _index(labels)})[word] = value * factor
    return found


def _index(labels: Labels) -> str:
    """`0`; of a MIG instance `0:3`, because each has its own memory."""
    instance = labels.get("GPU_I_ID")
    return labels.get("gpu", "?") + (f":{instance}" if instance else "")


def _constant(page: Page, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Names, and the size of each memory, which is what is used, free and reserved together."""
    used = page.samples.get(DCGM["memory_used_bytes"][0], [])
    labelled = {_index(labels): labels for labels, _ in used}
    drivers = {driver for labels in labelled.values() if (driver := labels.get("DCGM_FI_DRIVER_VERSION"))}
    return {
        "driver": ", ".join(sorted(drivers)),
        "gpus": [
            {
                "index": index,
                "name": labelled.get(index, {}).get("modelName", ""),
                "uuid": labelled.get(index, {}).get("UUID", ""),
                "memory_total_bytes": sum(
                    gpu.get(f"memory_{part}_bytes", 0.0) for part in ("used", "free", "reserved")
                ),
            }
            for index, gpu in found.items()
        ],
    }
