"""A vLLM plugin that adds the ladder architecture to vLLM (https://docs.vllm.ai, "Plugin System").

Every process of the engine calls `register`.
"""


def register() -> None:
    """Register the ladder architecture with vLLM.

    The class is passed to vLLM by name. Importing the class here would initialise CUDA too early."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("LadderLlamaForCausalLM", "ladder_residual.vllm_llama:LadderLlamaForCausalLM")
