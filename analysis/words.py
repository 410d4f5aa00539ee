"""Until every module has a typed summary and builds documents: what these called it of `analysis.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.metrics import METRICS
from analysis.report import findings
from analysis.report.format import UNKNOWN, count, duration, scale_of, share, significant, size, unit_of
from analysis.summary import typed

__all__ = ["UNKNOWN", "count", "duration", "scale_of", "share", "significant", "size", "unit_of"]

Summary = Mapping[str, Any]
NAMES = {name: metric.short for name, metric in METRICS.items()}


def simulated(summary: Summary) -> str:
    server = summary["server"]
    if not server["simulated"]:
        return ""
    return "SIMULATED" if server["speed"] in (None, 1) else f"SIMULATED at {server['speed']:g} times speed"


def who(summary: Summary) -> str:
    server = summary["server"]
    name = " ".join(str(part) for part in (server["name"], server["version"]) if part)
    return f"{name} on {platform}" if (platform := server.get("platform")) else name


def endings(summary: Summary) -> str:
    return findings.endings(typed(summary))


def all_complete(summary: Summary) -> bool:
    return typed(summary).requests.all_complete


def believe(summary: Summary) -> str:
    return findings.client_said(typed(summary))


def warnings(summary: Summary) -> list[str]:
    ids = ("counters", "bottleneck", "forced", "interrupted", "damaged", "coalesced", "reopened", "note")
    return [each.sentence for each in findings.findings(typed(summary)) if each.id in ids and each.level == "warning"]


def objective(entry: Mapping[str, Any]) -> str:
    out = f"; {count(entry['left_out'], 'request')} not complete and left out" if entry["left_out"] else ""
    return f"{entry['objective']}: {entry['said']}{out}"


def of_sessions(summary: Summary) -> bool:
    return (summary["run"]["workload"] or "").startswith("multi-turn")
