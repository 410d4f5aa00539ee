"""The configurations that `loadgen plan-capacity` searches: a GPU type, an engine, and how the engine uses the GPUs.

`SearchSpace.configurations` enumerates all combinations, and states which of them an engine cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from loadgen.servers.hardware import ModelShape
from loadgen.servers.hardware.inference import NODE_GPUS, Deployment, ServingOptions, heads_problem
from loadgen.servers.simulated.scheduler import Policy
from loadgen.servers.simulated.scheduler_presets import CURRENT, TENSORRT_LLM, Engine, find_engine


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An inference engine and the features that it supports, such as pipelines or separate prefill workers."""

    name: str
    title: str
    framework: str
    """Name of the engine for `loadgen limits --framework`."""
    simulated: bool = True
    """True if `loadgen simulate` has a server of this name."""
    pipelines: bool = True
    disaggregation: bool = True
    """True if separate workers can compute the prompts."""
    experts: str = "any"
    """Numbers of expert groups: `none`, `all` (1 or one per GPU), or `any` divisor of the number of GPUs."""
    attention_alone: bool = False
    """True if attention data parallelism excludes tensor parallelism."""

    def preset(self) -> Engine:
        """Return the batching policy and the overheads of the engine."""
        return find_engine(self.name, CURRENT) if self.simulated else TENSORRT_LLM


ENGINES: Mapping[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind("vllm", "vLLM", "vllm", experts="all"),
        EngineKind("sglang", "SGLang", "sglang"),
        EngineKind("tgi", "TGI", "vllm", pipelines=False, disaggregation=False, experts="none"),
        EngineKind("trtllm", "TensorRT-LLM", "trtllm", simulated=False, attention_alone=True),
    )
}
"""Engines that `--engine` can name, by name. The options of their servers decide what they can do."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to serve a model: the type and the number of GPUs in one replica, and how an engine uses these GPUs.

    If `disaggregated` is True, separate workers compute prompts (prefill) and generate tokens (decode). The GPUs are
    then those of one worker instead of a replica.
    """

    gpu: str
    format: str = "bf16"
    engine: str = "vllm"
    tensor: int = 1
    pipeline: int = 1
    expert_parallel: int = 1
    attention_data: int = 1
    draft_tokens: int = 0
    disaggregated: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs of one replica or worker."""
        return self.tensor * self.pipeline * self.attention_data

    @property
    def extras(self) -> int:
        """Number of features beyond tensor parallelism. A configuration with fewer of them is simpler to run."""
        sizes = (self.pipeline, self.expert_parallel, self.attention_data)
        return sum(size > 1 for size in sizes) + (self.draft_tokens > 0) + 2 * self.disaggregated

    @property
    def layout(self) -> str:
        """Text that says how a replica uses its GPUs, such as `TP2 PP2`.

        Parts of size 1 are omitted, except tensor parallelism.
        """
        parts = [f"TP{self.tensor}"]
        parts += [f"PP{self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"EP{self.expert_parallel}"] if self.expert_parallel > 1 else []
        parts += [f"DP{self.attention_data}"] if self.attention_data > 1 else []
        parts += [f"draft{self.draft_tokens}"] if self.draft_tokens else []
        return " ".join(parts)

    def serving(self, space: SearchSpace) -> ServingOptions:
        """Return the ServingOptions that combine this configuration with the settings of the search."""
        return ServingOptions(
            self.expert_parallel,
            self.attention_data,
            self.draft_tokens,
            space.acceptance,
            self.pipeline,
            space.node_gpus,
            space.cache_hit_rate,
            space.chunked_prefill,
        )

    def deployment(self, model: ModelShape | str, space: SearchSpace) -> Deployment:
        """Return the deployment of a model in this configuration.

        Raises HardwareError for an unknown GPU, model or number format.
        """
        preset = ENGINES[self.engine].preset()
        deployment = preset.deployment(
            self.gpu, model, format_name=self.format, tensor=self.tensor, file=space.hardware
        )
        return self.serving(space).apply(deployment)


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search combines, such as GPU types and engines, and limits on the combinations."""

    gpus: Sequence[str]
    formats: Sequence[str] = ("bf16",)
    engines: Sequence[str] = ("vllm",)
    tensors: Sequence[int] = (1, 2, 4, 8)
    pipelines: Sequence[int] = (1,)
    expert_groups: Sequence[int] = (1,)
    attention_groups: Sequence[int] = (1,)
    drafts: Sequence[int] = (0,)
    disaggregation: Sequence[bool] = (False,)
    acceptance: float | None = None
    cache_hit_rate: float = 0.0
    chunked_prefill: str = ""
    step_tokens: int | None = None
    node_gpus: int = NODE_GPUS
    max_gpus: int | None = None
    hardware: Path | None = None

    @property
    def assumptions(self) -> dict[str, float | int | str]:
        """The assumptions about serving that the user set, as a mapping from option names to values.

        The names are `cache_hit_rate`, `chunked_prefill`, `step_tokens` and `acceptance`. Options that the user did not
        set are omitted. `acceptance` is the probability that a drafted token is accepted. It is also omitted if no
        configuration drafts tokens.
        """
        values: dict[str, float | int | str | None] = {
            "cache_hit_rate": self.cache_hit_rate or None,
            "chunked_prefill": self.chunked_prefill or None,
            "step_tokens": self.step_tokens,
            "acceptance": self.acceptance if any(self.drafts) else None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def policy(self, engine: str, kv_tokens: int) -> Policy:
        """Return the batching policy of an engine for a KV cache of this size."""
        policy = ENGINES[engine].preset().policy_for(kv_tokens, step_tokens=self.step_tokens)
        return policy.with_serving(self.cache_hit_rate, self.chunked_prefill)

    def configurations(self, model: ModelShape) -> Iterator[tuple[Configuration, str]]:
        """Yield every combination, with the reason why the engine cannot run it, or "" if it can."""
        for values in product(
            self.gpus,
            self.formats,
            self.engines,
            self.tensors,
            self.pipelines,
            self.expert_groups,
            self.attention_groups,
            self.drafts,
            self.disaggregation,
        ):
            configuration = Configuration(*values)
            yield configuration, self._impossible(configuration, model)

    def _impossible(self, configuration: Configuration, model: ModelShape) -> str:
        """Return a short reason why an engine cannot run a configuration, or "" if it can."""
        kind = ENGINES[configuration.engine]
        groups, experts = configuration.attention_data, configuration.expert_parallel
        stage = configuration.tensor * groups
        reasons = {
            "more stages than layers": configuration.pipeline > model.layers,
            "the model has no experts": model.experts is None and (groups > 1 or experts > 1),
            "--ep does not divide the experts or the GPUs of a layer": stage % experts
            or (model.experts and model.experts.count % experts),
            "more GPUs per layer than a machine has (--gpus-per-node)": stage > self.node_gpus,
            "the engine has no pipelines": configuration.pipeline > 1 and not kind.pipelines,
            "the engine has no separate workers": configuration.disaggregated and not kind.disaggregation,
            "the engine has no such expert parallelism": not _allows_experts(kind, experts, stage)
            or (kind.experts == "none" and groups > 1),
            "the engine has no such attention parallelism": kind.attention_alone
            and groups > 1
            and configuration.tensor > 1,
        }
        problem = heads_problem(model, configuration.tensor)
        return problem or next((reason for reason, applies in reasons.items() if applies), "")


def _allows_experts(kind: EngineKind, groups: int, gpus: int) -> bool:
    """Return True if the engine `kind` can divide the experts of a model among `groups` groups.

    For example, some engines allow only one group, or one group for each of the `gpus` GPUs.
    """
    if groups == 1:
        return True
    return kind.experts == "any" or (kind.experts == "all" and groups == gpus)
