"""Simulated servers that speak the protocols of vLLM, TGI, LightLLM, SGLang and TEI without running a model.

docs/simulated.md describes the simulated servers. An arrow points from a module to the modules that it imports:

    config ──> stream_sender ──> protocol, token_clock             options, and how responses are sent
    vllm, tgi, lightllm, sglang, tei ──> state ──> stream_sender   one module per backend: requests to bytes
    server ──> process                                             HTTP, in this process or in a child process
"""


class SimulatedError(ValueError):
    """A mistake by the user who starts a simulated server. The message says what to change."""


class ConfigError(SimulatedError):
    """Raised for invalid settings of a simulated server, and for an invalid fault.

    A fault is an error that the server simulates, such as `slow-headers`. The message lists all mistakes.
    """


class StartError(SimulatedError):
    """A simulated server did not start. The message ends with the server's error output."""
