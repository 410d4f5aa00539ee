"""Servers without a model that speak the protocols of vLLM, TGI and LightLLM. docs/simulated.md describes them.

config ──> stream_sender ──> protocol, token_clock    options, and how responses are sent
vllm, tgi, lightllm ──> state ──> stream_sender       one module per backend: requests to bytes
server ──> process                                    HTTP, in this process or in a child process
"""


class SimulatedError(ValueError):
    """A mistake by the person who started the simulated server. The message says what to change."""


class ConfigError(SimulatedError):
    """A config or a fault that is not valid. The message lists every mistake."""


class StartError(SimulatedError):
    """A simulated server did not start. The message contains the end of the child process's error output."""
