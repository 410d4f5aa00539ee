"""The metrics of several replicas, some of which cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.servers.telemetry import GapError, NotMeasuredError, ReplicaMetrics


class Fixed:
    """A source that always has the same values, or always fails."""

    def __init__(self, result: dict[str, Any] | GapError) -> None:
        self.facts = {"from": "here"}
        self._result = result

    def read(self, limit_s: float) -> dict[str, Any]:  # noqa: ARG002 - part of the protocol
        if isinstance(self._result, GapError):
            raise self._result
        return self._result

    def close(self) -> None:
        """Nothing to close."""


def test_values_of_the_other_replicas_are_kept() -> None:
    """One of three replicas cannot be read: there is no sum, and the error has the values of the others."""
    first, third = {"output_tokens": 5}, {"output_tokens": 7}
    metrics = ReplicaMetrics({"a": Fixed(first), "b": Fixed(NotMeasuredError("no metrics")), "c": Fixed(third)})
    with pytest.raises(GapError, match="b: no metrics") as caught:
        metrics.read(1.0)
    assert caught.value.values == {"replicas": [{"url": "a", **first}, {"url": "c", **third}]}
    assert not isinstance(caught.value, NotMeasuredError)


def test_no_replica_can_be_read_at_all() -> None:
    """The source is then not measured, as that of a single server."""
    metrics = ReplicaMetrics({url: Fixed(NotMeasuredError("no metrics")) for url in "ab"})
    with pytest.raises(NotMeasuredError, match="a: no metrics; b: no metrics") as caught:
        metrics.read(1.0)
    assert caught.value.values == {}
