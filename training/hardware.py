"""What the device can do: whether it multiplies bfloat16 natively, and its peak rate."""

import contextlib
import functools
import resource
import sys
import time
from contextlib import AbstractContextManager

import torch

# Dense bfloat16 peak without sparsity, float16's too, in FLOP/s, from the makers' data sheets:
# NVIDIA A10, A30, A100, H100 (SXM, PCIe, NVL), H200, GH200, L4, L40, L40S and HGX B200, and AMD's
# MI300X; where a sheet gives the figure with sparsity alone (H100 NVL, L4, B200), half of it. A
# device that is not listed has an MFU unknown; a guessed peak would make every figure wrong.
PEAK_16_BIT_FLOPS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1307e12,
}

# A product of this many rows and columns keeps all of a CPU busy; so long it may be measured.
SIZE_OF_MEASURED_PRODUCT = 768
SECONDS_OF_MEASUREMENT = 0.05


def devices_called(name: str) -> list[str]:
    """Listed devices of this name; else those whose names hold it, in any case.

    As words, if any does so: H200 is not GH200.
    """
    if name in PEAK_16_BIT_FLOPS:
        return [name]
    holding = [known for known in PEAK_16_BIT_FLOPS if name.lower() in known.lower()]
    as_words = [known for known in holding if f" {name.lower()} " in f" {known.lower()} "]
    return as_words or holding


def resolve_dtype(requested: str, device: torch.device) -> str:
    """The dtype of matrix products, by its name in torch, for an option's value.

    Args:
        requested: float32, bfloat16 or auto: bfloat16 where the hardware has instructions for it
            (emulated, it is slower than float32).
        device: where it will run.
    """
    if requested != "auto":
        return requested
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if native else "float32"


def allow_tf32(device: torch.device) -> None:
    """Let a GPU's float32 products read 10 bits of each factor: about eight times as fast.

    Their sums stay float32. What needs more than that, norms, losses, updates, multiplies no
    matrices. A CPU keeps its full products.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Context in which matrix products run in `dtype`; nothing for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak in `dtype` matrix products, FLOP/s; None where it is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return PEAK_16_BIT_FLOPS.get(torch.cuda.get_device_name(device))


@functools.cache
def measured_peak_flops(dtype: torch.dtype) -> float:
    """This process's best rate in `dtype` matrix products on its CPU threads, FLOP/s.

    No data sheet knows how many cores a process may use, nor at what clock: so the best of some
    large products is the peak. It is measured once, for about 50 ms.
    """
    factor = torch.full((SIZE_OF_MEASURED_PRODUCT, SIZE_OF_MEASURED_PRODUCT), 0.5, dtype=dtype)
    product = torch.empty_like(factor)
    times: list[float] = []
    while sum(times) < SECONDS_OF_MEASUREMENT:
        began = time.perf_counter()
        torch.mm(factor, factor, out=product)
        times.append(time.perf_counter() - began)
    return 2 * SIZE_OF_MEASURED_PRODUCT**3 / min(times)


def peak_memory_gb(device: torch.device) -> float:
    """Most memory that this process has used so far, in GB of 2^30 bytes.

    On a GPU what its tensors took there, on a CPU the process's resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident / (2**30 if sys.platform == "darwin" else 2**20)
