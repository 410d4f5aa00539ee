"""Servers without a model that speak vLLM's, TGI's and LightLLM's protocols: docs/simulated.md.

config ──> stream ──> protocol, timing          what one is told, and how its answers leave
vllm, tgi, lightllm ──> state ──> stream        one file per server kind; requests to bytes
server ──> process                              HTTP, here or in a process of its own
"""


class SimulatedError(ValueError):
    """A mistake of the person who started the simulated server; the message says what to change."""


class ConfigError(SimulatedError):
    """A config or a fault that no simulated server can work with; lists every mistake."""


class StartError(SimulatedError):
    """A simulated server did not come up; of one in a child process the message holds the last words."""
