"""A vLLM plugin (https://docs.vllm.ai, "Plugin System"). Every process of the engine calls `register`."""


def register() -> None:
    """Register the architecture by the name of its class: an import here would initialise CUDA too early."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("LadderLlamaForCausalLM", "ladder_residual.vllm_llama:LadderLlamaForCausalLM")
