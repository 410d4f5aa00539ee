"""A plugin of vLLM (https://docs.vllm.ai, "Plugin System"): every process of the engine calls `register`."""


def register() -> None:
    """Makes vLLM know the architecture. The class is named, not imported: that would initialise CUDA too early."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("LadderLlamaForCausalLM", "ladder_residual.vllm_llama:LadderLlamaForCausalLM")
