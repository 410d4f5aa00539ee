"""Servers that generate long responses in pieces: which lengths come of it, and what a plan is told beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.engine.resolve_server import piece_advice
from loadgen.plan import Plan
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.backends.dialect import round_up_to_pieces
from loadgen.servers.discovery import fitting_output
from tests.support.answers import ending, token
from tests.support.dialects import DIALECTS

KEY = ("tgi", "generate")
NEW, OLD = "3.3.6-dev0 (sha-dfb3fbe)", "2.4.1"


def facts(total: int = 4096, prompt: int | None = None, version: str = NEW) -> ServerFacts:
    """A TGI with these limits."""
    notes = {"prompt_piece_tokens": 1024} if version == NEW else {}
    limits = {"max_total_tokens": total, "max_input_tokens": prompt or total - 1}
    return ServerFacts("tgi", "http://h", version, limits=limits, title="TGI", notes=notes)


@pytest.mark.parametrize(
    ("asked", "made"), [(1, 1), (1024, 1024), (1025, 2048), (1200, 2048), (2048, 2048), (2049, 3072)]
)
def test_a_long_response_is_whole_pieces(asked: int, made: int) -> None:
    """Up to one piece it is what was asked. Without pieces it always is."""
    assert round_up_to_pieces(asked, 1024) == made
    assert round_up_to_pieces(asked, 0) == asked


@pytest.mark.parametrize(
    ("total", "prompt", "asked", "made"),
    [
        (4096, None, 1200, 2048),
        (2560, None, 1200, 2048),
        (2559, None, 1200, 1024),  # a second piece does not fit behind 512 + 1024 tokens
        (2048, None, 1536, 1024),
        (4096, 1536, 1200, 2048),
        (4096, 1535, 1200, 1024),  # the second piece's prompt, 512 + 1024 tokens, is over the limit on prompts
        (2048, None, 1000, 1000),
    ],
)
def test_a_piece_that_does_not_fit_is_not_begun(total: int, prompt: int | None, asked: int, made: int) -> None:
    """A response ends before the piece that the server's limits leave no room for."""
    assert fitting_output(facts(total, prompt), 512, asked) == made


def test_limits_that_are_not_known_leave_whole_pieces() -> None:
    """A gateway may hide them."""
    hidden = ServerFacts("tgi", "http://h", NEW, notes={"prompt_piece_tokens": 1024})
    assert fitting_output(hidden, 512, 1200) == 2048


@pytest.mark.parametrize(
    ("output_tokens", "words"),
    [
        (1024, ""),
        (2048, ""),
        (
            1200,
            "TGI 3.x generates in pieces of 1,024 tokens: 1,200 becomes 2,048. "
            "Ask for at most 1,024, or a multiple of it.",
        ),
        ("max:1200", "1,200 becomes 2,048."),
        ("uniform:1..1024", ""),
        ("uniform:1200..1201", "1,200 becomes 2,048, 1,201 becomes 2,048."),
        ("uniform:1025..1500", "1,025 becomes 2,048, and so on up to 1,500, which becomes 2,048."),
        ("lognormal:mean=900,cv=0.5", "which becomes"),
        ("lognormal:mean=128,cv=0.5,max=1000", ""),
    ],
)
def test_a_plan_is_told_what_becomes_of_its_lengths(output_tokens: int | str, words: str) -> None:
    """One line, which names the lengths that the server will not give; none where it gives them all."""
    plan = Plan(server="tgi", input_tokens=512, output_tokens=output_tokens, n=5000)
    advice = piece_advice(plan, facts())
    assert (words in advice) if words else (advice == "")
    assert piece_advice(plan, facts(version=OLD)) == ""


def test_a_plan_is_told_that_a_second_piece_does_not_fit() -> None:
    """The line names the length that really comes."""
    plan = Plan(server="tgi", input_tokens=512, output_tokens=1200, n=1)
    assert "1,200 becomes 1,024." in piece_advice(plan, facts(2048))


def test_lengths_of_a_trace_are_looked_at(tmp_path: Path) -> None:
    """A trace brings its own."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
        '{"timestamp": 1000, "input_length": 10, "output_length": 1500, "hash_ids": [1]}\n'
    )
    plan = Plan(server="tgi", arrivals=f"trace:{file}", n=None)
    assert "1,500 becomes 2,048." in piece_advice(plan, facts())


def answer(tokens: int, asked: int, version: str) -> tuple[str, str, str]:
    """What becomes of a native stream of so many tokens."""
    dialect = DIALECTS[KEY].variant(version)
    events = [token(KEY, number, last=number == tokens, total=tokens) for number in range(1, tokens + 1)]
    return ending(KEY, *events, asked=asked, dialect=dialect)


def test_a_whole_piece_too_many_is_complete() -> None:
    """The server was not told otherwise: the length is not as requested, and the figures count."""
    assert answer(2048, 1200, NEW) == ("complete", "", "")
    assert answer(1024, 1200, NEW) == ("complete", "", "")


@pytest.mark.parametrize(("tokens", "asked", "version"), [(2049, 1200, NEW), (1025, 1000, NEW), (2048, 1200, OLD)])
def test_other_lengths_are_wrong(tokens: int, asked: int, version: str) -> None:
    """More than the pieces explain, and a piece too many from a version without pieces."""
    state, kind, _ = answer(tokens, asked, version)
    assert (state, kind) == ("failed", "wrong_length")


@pytest.mark.parametrize("endpoint", [dialect for name, dialect in DIALECTS if name == "tgi"])
def test_every_route_of_tgi_3_has_pieces(endpoint: str) -> None:
    """The router cuts all requests alike; versions before 3.0 cut none."""
    dialect = DIALECTS["tgi", endpoint]
    pieces = {version: dialect.variant(version).piece_tokens for version in ("1.1.1", "2.4.1", "3.0.0", NEW)}
    assert pieces == {"1.1.1": 0, "2.4.1": 0, "3.0.0": 1024, NEW: 1024}
    assert dialect.max_piece_tokens == 1024
    assert not any(kind.dialects[kind.native].max_piece_tokens for name, kind in BACKENDS.items() if name != "tgi")
