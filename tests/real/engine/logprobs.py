"""What a checkpoint makes of a prompt by the plain Llama of `loadgen.servers.ladder`, in fp32: the logarithm of the
probability of each token but the first.

    PYTHONPATH=. .engine/vllm/bin/python tests/real/engine/logprobs.py .engine/model ladder 5,17,3
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from loadgen.dissect.models.llama import build_model
from loadgen.servers.hardware.huggingface import shape_of


def main(folder: Path, architecture: str, ids: list[int]) -> list[float]:
    model = build_model(shape_of(folder), architecture=architecture)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    for each in model.modules():
        if isinstance(each, torch.nn.RMSNorm):
            each.eps = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        found = model(tokens).log_softmax(-1)
    return [float(found[0, place, each]) for place, each in enumerate(ids[1:])]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], [int(each) for each in sys.argv[3].split(",")])))
