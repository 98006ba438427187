"""A device's figures are its maker's, or unknown."""

import pytest
import torch

from training.hardware import (
    PEAK_16_BIT_FLOPS,
    allow_tf32,
    autocast,
    measured_peak_flops,
    peak_flops,
)

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")


@pytest.fixture
def names(monkeypatch) -> dict[torch.device, str]:
    """What each device is called."""
    names = {GPU: "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    return names


def test_the_peak_is_that_of_the_device_of_this_process(names):
    names[torch.device("cuda", 0)] = "NVIDIA A100-SXM4-80GB"
    assert peak_flops(GPU, torch.bfloat16) == peak_flops(GPU, torch.float16) == 989e12
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == 312e12


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100", "nvidia h200", ""])
def test_the_peak_of_a_device_that_is_not_listed_is_unknown(names, name):
    assert name not in PEAK_16_BIT_FLOPS
    names[GPU] = name
    assert peak_flops(GPU, torch.bfloat16) is None


def test_the_peak_of_other_products_than_bfloat16_is_unknown(names):
    assert peak_flops(GPU, torch.float32) is None
    assert peak_flops(CPU, torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_products_run_in_the_dtype_and_weights_stay_wide(dtype):
    layer = torch.nn.Linear(4, 4)
    with autocast(CPU, dtype):
        assert torch.is_autocast_enabled("cpu") == (dtype == torch.bfloat16)
        product = layer(torch.ones(2, 4))
    assert product.dtype == dtype
    product.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_a_cpus_peak_is_measured_once_and_draws_no_random_number():
    before = torch.get_rng_state()
    peak = measured_peak_flops(torch.float32)
    assert peak > 1e8
    assert measured_peak_flops(torch.float32) is peak
    assert torch.equal(torch.get_rng_state(), before)


def test_tf32_is_for_gpus_alone(monkeypatch):
    asked_for: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked_for.append)
    allow_tf32(CPU)
    assert not asked_for
    allow_tf32(GPU)
    assert asked_for == ["high"]
