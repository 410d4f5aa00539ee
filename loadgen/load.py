"""From a Plan's words to numbers: due instants, clients, and how much can be under way at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.plan import ANSWERS, Plan
from workloads.arrivals import Concurrency, due_instants, parse
from workloads.lengths import Fixed, Uniform
from workloads.lengths import parse as parse_lengths
from workloads.workload import MultiTurn
from workloads.workload import parse as parse_workload

IN_FLIGHT_DEFAULT = 10_000
"""Open loop: more requests than this at a time are dropped unless the plan says otherwise."""
SPARE_LEAST = 8
SESSION_TOKENS = 1 << 15
"""What a server is checked, or simulated, to have room for where the sessions are a file's."""
TURN_TOKENS = 16
"""What a line break or a chat template may add to each thing said."""
BYTES_PER_RECORD = 600
BYTES_PER_CHUNK = 16
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """What a Plan's arrivals come to."""

    due_ns: Sequence[int] | None
    """Open loop: every due offset, in order. None: a closed loop."""
    count: int | None
    """Requests in all; None for a closed loop that only its duration ends."""
    clients: int
    think_ns: int
    until_ns: int | None
    in_flight: int
    """Past it a request is dropped."""
    spare: int
    """Connections worth opening before they are needed."""

    @property
    def at_once(self) -> int:
        """Requests that are certainly under way together: all of a burst, every client of a closed loop."""
        if self.due_ns is None:
            return self.clients
        return len(self.due_ns) if self.due_ns and self.due_ns[0] == self.due_ns[-1] else 1


def load_of(plan: Plan) -> Load:
    """Raises workloads.syntax.WorkloadError for a trace that cannot be read."""
    arrivals = parse(plan.arrivals)
    until_ns = None if plan.duration_s is None else round(plan.duration_s * NS_PER_S)
    if isinstance(arrivals, Concurrency):
        clients = arrivals.clients if plan.n is None else min(arrivals.clients, plan.n)
        return Load(None, plan.n, clients, arrivals.think_ns, until_ns, clients, clients)
    due_ns = array("q", due_instants(arrivals, plan.seed, n=plan.n, until_ns=until_ns))
    in_flight = min(len(due_ns), plan.max_in_flight or max(IN_FLIGHT_DEFAULT, _most_within_a_second(due_ns)))
    spare = min(in_flight, max(SPARE_LEAST, _most_within_a_second(due_ns)))
    return Load(due_ns, len(due_ns), 0, 0, None, in_flight, spare)


def bytes_of(plan: Plan, load: Load) -> int:
    """What the run file will take, roughly: to refuse a disk that is clearly too small."""
    return (load.count or load.clients) * (BYTES_PER_RECORD + BYTES_PER_CHUNK * longest_of(plan.output_tokens))


def longest_of(tokens: int | str) -> int:
    """The longest that a plan's lengths can be where that is known, else 1: it cannot be checked beforehand."""
    if tokens == ANSWERS:
        return 1
    named = parse_lengths(str(tokens))
    return named.length if isinstance(named, Fixed) else named.high if isinstance(named, Uniform) else 1


def longest_prompt_of(plan: Plan) -> int:
    """The longest prompt, as far as it is known: a session's last turn holds all that was said before."""
    asked, answered = longest_of(plan.input_tokens), longest_of(plan.output_tokens)
    named = parse_workload(plan.workload)
    if not isinstance(named, MultiTurn):
        return asked
    if named.turns is None:
        return SESSION_TOKENS
    return named.turns * (asked + TURN_TOKENS) + (named.turns - 1) * (answered + TURN_TOKENS)


def part_of(whole: int, worker: int, workers: int) -> int:
    """One worker's part of something dealt out in turn."""
    return whole // workers + (worker < whole % workers)


def _most_within_a_second(due_ns: Sequence[int]) -> int:
    most = first = 0
    for last, due in enumerate(due_ns):
        while due - due_ns[first] >= NS_PER_S:
            first += 1
        most = max(most, last - first + 1)
    return most
