"""Computes the shares of requests or responses that objectives can bound, such as `complete >= 99%`.

Comparisons and repeats use the same shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from loadgen.analysis.objectives import Goodput
from loadgen.analysis.reasoning import Answered
from loadgen.analysis.summary import RequestCounts
from loadgen.analysis.valid_outputs import ValidOutputs

Counts = tuple[int, int]
"""Numerator and denominator of a share, such as the numbers of complete and of planned requests."""


class ResponseFigures(Protocol):
    """Interface of a summary with the figures that are needed to compute shares, such as the share of complete
    requests.

    The summary describes a whole run or a part of it.
    """

    @property
    def requests(self) -> RequestCounts: ...
    @property
    def goodput(self) -> Goodput | None: ...
    @property
    def outputs(self) -> ValidOutputs | None: ...
    @property
    def answered(self) -> Answered | None: ...


def counts_of(figure: str, figures: ResponseFigures) -> Counts:
    """Return the numerator and the denominator of the share `figure`, such as `complete`. The denominator is 0 if the
    share is unknown.
    """
    return SHARES[figure](figures)


def _complete(figures: ResponseFigures) -> Counts:
    return figures.requests.complete, figures.requests.planned


def _good(figures: ResponseFigures) -> Counts:
    return (figures.goodput.good, figures.goodput.requests) if figures.goodput else (0, 0)


def _valid_outputs(figures: ResponseFigures) -> Counts:
    """Return two counts: the valid outputs, and all checked outputs.

    Both are 0 if some outputs could not be checked, or if no request has tools or a schema.
    """
    outputs = figures.outputs
    return (outputs.valid, outputs.checked) if outputs and not outputs.unchecked else (0, 0)


def _answered(figures: ResponseFigures) -> Counts:
    """Return two counts: the complete responses that reached an answer, and all complete responses.

    A response that begins with reasoning may end before its answer begins. Both counts are 0 if no response has
    reasoning.
    """
    return (figures.answered.answered, figures.answered.responses) if figures.answered else (0, 0)


SHARES: Mapping[str, Callable[[ResponseFigures], Counts]] = {
    "complete": _complete,
    "attainment": _good,
    "valid_output": _valid_outputs,
    "answered": _answered,
}
"""Functions that return the counts of a share, by the name that --assert uses."""
