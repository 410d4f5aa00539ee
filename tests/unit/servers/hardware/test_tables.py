"""Rows of the hardware tables, and names that are in none."""

from __future__ import annotations

import pytest

from loadgen.servers.hardware import HardwareError, gpu, model, number_format, tables
from loadgen.servers.hardware.roofline import make_deployment


@pytest.mark.parametrize("name", [row["model"] for row in tables()["models"]])
def test_shapes_agree_with_the_parameter_counts(name: str) -> None:
    """Layers, head and an embedding of the head's size make up the published count, but for a thousandth: vectors of
    norms and biases, and learned positions."""
    shape = model(name)
    matrices = shape.layer_parameters + (2 - shape.tied) * shape.head_parameters
    assert shape.parameters == pytest.approx(matrices, rel=1e-3)
    assert shape.parameters >= matrices


def test_kv_cache_per_token() -> None:
    """Keys and values of all layers in 16 bits; 70B groups its queries and needs less than 7B."""
    sizes = {name: 2 * model(name).kv_values for name in ("Llama-2-7B", "Llama-2-13B", "Llama-2-70B")}
    assert sizes == {"Llama-2-7B": 524288, "Llama-2-13B": 819200, "Llama-2-70B": 327680}


def test_unknown_names_are_errors_that_name_the_nearest_one() -> None:
    """GPU, model, format and degree of tensor parallelism."""
    nearest = r"\(did you mean A800-80GB SXM.*\?\): choose one of RTX 3090"
    with pytest.raises(ValueError, match=rf"unknown GPU 'a8000' {nearest}"):
        gpu("a8000")
    with pytest.raises(ValueError, match=r"unknown model 'Llama-2-7' \(did you mean Llama-2-7B.*\?\): choose one of"):
        model("Llama-2-7")
    with pytest.raises(HardwareError, match="unknown number format 'xyz': choose one of fp32, bf16"):
        number_format("xyz")
    with pytest.raises(ValueError, match="0 x 1 GPUs: give 1 or more for --tp"):
        make_deployment("A800", "llama-2-7b", tensor=0)
