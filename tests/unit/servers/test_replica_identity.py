"""The name by which a response header identifies a replica, and the places to which URLs lead."""

from __future__ import annotations

import pytest

from loadgen.servers.replica_identity import REPLICA_NAME_MAX, find_places, replica_name


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("node-1", "node-1"),
        ("10.0.0.9:80, 10.0.0.2:80", "10.0.0.2:80"),
        ("10.0.0.9:80,10.0.0.2:80, ", "10.0.0.2:80"),
        ("", ""),
        (" , ", ""),
    ],
)
def test_the_last_server_of_a_list_has_answered(header: str, name: str) -> None:
    """nginx also names the servers that it has tried before. A retried request comes from no further replica."""
    assert replica_name(header) == name


def test_a_long_name_is_shortened() -> None:
    """A name fits a column of a table, and a line."""
    assert len(replica_name("n" * 1000)) <= REPLICA_NAME_MAX
    assert "\n" not in replica_name("a\nb")


def test_different_texts_of_one_server_lead_to_one_place() -> None:
    """The port, the path and the query count, and the text of the host does not."""
    one = find_places("http://127.0.0.1:8000")
    assert one & find_places("localhost:8000/v1/chat/completions")
    assert one == find_places("http://127.1:8000/")
    for other in ("http://127.0.0.1:8001", "http://127.0.0.1:8000/b", "http://127.0.0.1:8000?a=b", "unix:/run/a.sock"):
        assert not one & find_places(other)
    assert find_places("unix:/run/a.sock") == find_places("unix:/run//a.sock") != frozenset()
