"""The Grafana dashboard of docker-compose.yml asks for what the servers really publish."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loadgen.servers.backends import simulated_backends
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.simulated import running

ROOT = Path(__file__).parents[2]
DCGM = {
    *("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"),
    *("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_USED"),
    *("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE"),
}
"""Fields that the exporter publishes unless told otherwise (its etc/default-counters.csv)."""
METRIC = re.compile(r"\b(?:vllm:|tgi_|lightllm_|sglang:|te_|DCGM_)\w+")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana gets it: Compose turns `$$` into `$`."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    parsed: dict[str, Any] = json.loads(compose["configs"]["grafana-loadgen"]["content"].replace("$$", "$"))
    return parsed


@pytest.fixture(scope="module")
def published() -> set[str]:
    """Every sample name on the three servers' metrics pages; the simulated ones carry the real ones' names."""
    names = set(DCGM)
    for server in simulated_backends():
        with running(SimulatedConfig(server=server)) as there, urlopen(f"{there.url}/metrics", timeout=10) as page:
            for family in text_string_to_metric_families(page.read().decode()):
                names |= {family.name, *(sample.name for sample in family.samples)}
    return names


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def test_every_expression_asks_for_a_metric_that_exists(dashboard: dict[str, Any], published: set[str]) -> None:
    """A panel that asks for a name nobody publishes would stay empty without a word."""
    for panel in dashboard["panels"]:
        for expression in expressions(panel):
            (name,) = METRIC.findall(expression)
            assert name in published, panel["title"]


def test_counters_are_shown_as_rates_and_gauges_as_they_are(dashboard: dict[str, Any]) -> None:
    """Token counters grow for ever: their rate says something; over Grafana's interval, which knows the scrapes'."""
    for expression in (each for panel in dashboard["panels"] for each in expressions(panel)):
        is_token_counter = re.search(r"tokens_(total|sum)|input_length_sum", expression) is not None
        name = METRIC.findall(expression)[0]
        is_rate = re.fullmatch(rf"rate\({name}({{[^}}]*}})?\[\$__rate_interval\]\)", expression) is not None
        assert is_rate == is_token_counter


def test_the_first_panels_show_all_servers(dashboard: dict[str, Any]) -> None:
    """Running, waiting, output and prompt tokens stand side by side for each server. TEI generates no tokens, and does
    not publish how many requests run."""
    for panel in dashboard["panels"][:4]:
        shown = [METRIC.findall(each)[0].split("_")[0].split(":")[0] for each in expressions(panel)]
        without = () if panel["title"] in ("Requests waiting", "Prompt tokens per second") else ("te",)
        names = [name.replace("tei", "te") for name in simulated_backends()]
        assert shown == [name for name in names if name not in without]


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    """Each has a place, an id and a unit of its own; all fit into Grafana's 24 columns."""
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = {(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
    assert len(cells) == sum(place["w"] * place["h"] for place in places)
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in dashboard["panels"])
