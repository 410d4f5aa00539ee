"""Every kind of server that loadgen knows. To add one: a module beside this file, and its line in KINDS."""

from collections.abc import Iterable

from loadgen.servers.backends.base import Backend
from loadgen.servers.backends.lightllm import LIGHTLLM
from loadgen.servers.backends.openai import OPENAI
from loadgen.servers.backends.tgi import TGI
from loadgen.servers.backends.vllm import VLLM

BACKENDS: dict[str, Backend] = {kind.name: kind for kind in (VLLM, TGI, LIGHTLLM, OPENAI)}


def launchable_backends() -> tuple[str, ...]:
    """The kinds that can be started; the generic OpenAI one is a protocol, not a program."""
    return tuple(kind.name for kind in BACKENDS.values() if kind.port)


def simulated_backends() -> tuple[str, ...]:
    """The kinds that have a simulated server."""
    return tuple(kind.name for kind in BACKENDS.values() if kind.simulated)


def simulated_versions() -> dict[str, tuple[str, ...]]:
    """Return the versions that simulated servers can speak as, other than their usual one, by kind."""
    return {kind.name: tuple(kind.simulated_versions) for kind in BACKENDS.values() if kind.simulated_versions}


def join_or(names: Iterable[str]) -> str:
    """Names as a choice in a sentence: `vllm, tgi or lightllm`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
