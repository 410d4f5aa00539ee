"""Facts that servers report about themselves, in odd forms."""

from __future__ import annotations

import pytest

from loadgen.servers.backends.base import (
    LIMIT_MAX,
    ServerLimit,
    known_limits,
    model_cards,
    version_at_least,
    version_text,
)


@pytest.mark.parametrize(
    ("models", "names"),
    [
        ({"data": [{"id": "m"}]}, ["m"]),
        ({"data": ["m", "n"]}, ["m", "n"]),
        (["m"], ["m"]),
        ({"models": [{"name": "m"}]}, ["m"]),
        ({"data": [None, 7, {"id": None}, {"id": ""}, {"id": " "}, {}, ["m"], {"id": "m"}]}, ["m"]),
        ({"data": {"m": {}}}, []),
        ({"data": "m"}, []),
        (None, []),
    ],
)
def test_models_have_names(models: object, names: list[str]) -> None:
    """Lists of names are accepted. Entries without a name are left out, so that no request is for a model `None`."""
    assert [card["id"] for card in model_cards(models)] == names


@pytest.mark.parametrize(
    ("value", "known"),
    [
        (4096, True),
        (LIMIT_MAX, True),
        (0, False),
        (-1, False),
        (10**30, False),
        (True, False),
        ("4096", False),
        (4.5, False),
    ],
)
def test_a_limit_is_a_plausible_integer(value: object, known: bool) -> None:
    """A limit of 10^30 would make the header of the run unreadable."""
    assert known_limits({"max_model_len": ServerLimit("--max-model-len")}, {"max_model_len": value}) == (
        {"max_model_len": value} if known else {}
    )


def test_a_version_is_one_short_line() -> None:
    """A version may have any type and length."""
    assert [version_text(value) for value in ("0.11.0", 0.11, 3, None, ["0.11.0"], True)] == [
        "0.11.0",
        "0.11",
        "3",
        "",
        "",
        "",
    ]
    assert version_text("0.11\x1b[2J\n") == "0.11 [2J"
    assert len(version_text("9" * 100_000)) <= 100
    assert version_at_least("sha-1 3.3.6-dev0", 3, 0, 0)
    assert not version_at_least("9" * 5_000 + ".1", 0, 1, 0)
    assert version_at_least("9" * 5_000 + ".1.1", 3, 0, 0)
