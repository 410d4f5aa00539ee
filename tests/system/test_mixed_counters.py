"""Counters of several replicas behind nginx, and those of the same replicas, each at its own URL."""

from __future__ import annotations

from pathlib import Path

from loadgen.analysis.run.runfile import read
from tests.support.busy_proxies import nginx_in_turn
from tests.support.command import burst, summary_of
from tests.support.simulated import equal, replicas, urls_of

SUCCESS = (0, 5)
"""Exit codes of commands whose requests were all complete. A busy machine may limit the client."""
LOAD = ("--input-tokens", "16", "--output-tokens", "4")


def test_counters_behind_a_balancer_are_not_used(tmp_path: Path) -> None:
    """nginx passes the readings of the metrics to two replicas in turn: a warning, and no counters. The same replicas,
    each at its own URL, raise no warning, and their counters agree."""
    with replicas(*equal(2)) as servers, nginx_in_turn(tmp_path, *(server.url for server in servers)) as url:
        load = ("--rate", "20", "--duration", "5s", "--seed", "1", *LOAD)
        for number, server in enumerate(servers):  # the counters of the replicas are far apart
            (tmp_path / f"before-{number}").mkdir()
            code, _, err = burst(
                tmp_path / f"before-{number}", "--url", server.url, "--n", str(20 + 200 * number), *LOAD
            )
            assert code in SUCCESS, err
        results = {}
        for name, options in (("behind", ("--url", url)), ("direct", urls_of(servers))):
            (tmp_path / name).mkdir()
            code, out, err = burst(tmp_path / name, *options, *load, command="run")
            assert code in SUCCESS, err
            results[name] = summary_of(tmp_path / name), " ".join(out.split())
    summary, text = results["behind"]
    assert summary["mixed_replicas"] == 2
    assert "these are the counters of at least 2 replicas behind one address" in text
    assert summary["server_counters"] == {}
    summary, text = results["direct"]
    assert not summary.get("mixed_replicas")
    assert "behind one address" not in text
    assert summary["server_counters"]["requests_finished"]["agree"]
    assert {record.stamps for record in read(tmp_path / "direct" / "run").records} == {"ring"}
