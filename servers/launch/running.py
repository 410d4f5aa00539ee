"""A server that somebody else started and will end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from servers.errors import LaunchError
from servers.find import probe
from servers.launch.base import Launched, Say, Wanted


@contextmanager
def launched(wanted: Wanted, say: Say) -> Iterator[Launched]:
    """The server at options["url"]; options["api_key_env"] names the environment variable with its key. Ends nothing.

    Raises LaunchError without a URL, and what `probe` raises when the server named does not answer there.
    """
    url = wanted.options.get("url")
    if not url:
        raise LaunchError(f"the URL of the running {wanted.server} is missing", "name it as url = ...")
    key = os.environ.get(wanted.options.get("api_key_env", "LOADGEN_API_KEY"))
    facts = probe(url, wanted.server, api_key=key)
    say(f"{wanted.server} {facts.version} at {facts.url}")
    yield Launched(facts.url, {"launch": "running"})
