"""The supported backends (server programs).

To add a backend, add a module to this package and an entry to BACKENDS.
"""

from collections.abc import Iterable

from loadgen.servers.backends.base import Backend
from loadgen.servers.backends.lightllm import LIGHTLLM
from loadgen.servers.backends.openai import OPENAI
from loadgen.servers.backends.sglang import SGLANG
from loadgen.servers.backends.tei import TEI
from loadgen.servers.backends.tgi import TGI
from loadgen.servers.backends.vllm import VLLM

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (VLLM, TGI, LIGHTLLM, SGLANG, TEI, OPENAI)}


def launchable_backends() -> tuple[str, ...]:
    """Return the names of the backends that loadgen can start.

    The generic OpenAI backend is a protocol without a program, so it cannot be started."""
    return tuple(backend.name for backend in BACKENDS.values() if backend.port)


def simulated_backends() -> tuple[str, ...]:
    """Return the names of the backends that have a simulated server."""
    return tuple(backend.name for backend in BACKENDS.values() if backend.simulated)


def token_simulators() -> tuple[str, ...]:
    """Return the names of the backends with a simulated server that generates tokens."""
    named = ((name, BACKENDS[name]) for name in simulated_backends())
    return tuple(name for name, backend in named if backend.dialects[backend.native].streams)


def simulated_versions() -> dict[str, tuple[str, ...]]:
    """Return the versions that simulated servers of each backend can imitate, by the name of the backend.

    The default version is not included. A backend with only one simulated version is left out.
    """
    return {
        backend.name: tuple(backend.simulated_versions) for backend in BACKENDS.values() if backend.simulated_versions
    }


def join_or(names: Iterable[str]) -> str:
    """Join the names with commas and `or` for a message, such as `vllm, tgi or lightllm`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
