"""How much memory do head and loss take, against the logits in one piece?

    python benchmarks/loss_memory.py [--json FILE]

`model.loss.head_loss` against a linear layer and F.cross_entropy on fp32 logits, forward and
backward, gradients of features and weight included, on the CPU. Each runs in a process of its own,
whose resident memory at its highest is compared with what it was before; Linux tells both. With
bfloat16 products run under autocast and weights stay float32.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks.side_by_side import write_figures
from model.loss import head_loss

DTYPES = ("float32", "bfloat16")


def main() -> None:
    """Start a process for each, or be one."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--tokens", type=int, default=8192)
    flags.add_argument("--vocab_size", type=int, default=50304)
    flags.add_argument("--d_model", type=int, default=768)
    flags.add_argument("--threads", type=int, default=2, help="(default 2)")
    flags.add_argument("--json", help="file for the figures")
    flags.add_argument("--of", choices=["ours", "plain"], help="of one process")
    flags.add_argument("--dtype", choices=DTYPES, default="float32", help="of one process")
    options = flags.parse_args()
    if options.of is not None:
        print(growth(options))
        return
    write_figures(options.json, {"loss_memory_ratio": loss_memory_ratio(sys.argv[1:])})


def loss_memory_ratio(arguments: Sequence[str] = ()) -> float:
    """Ours over plain, of the dtype in which it is larger.

    Args:
        arguments: of this script.
    """
    ratios = []
    for dtype in DTYPES:
        ours, plain = (_growth_in_a_process(of, dtype, arguments) for of in ("ours", "plain"))
        print(f"head and loss, {dtype}: ours {ours / 2**20:.0f} MB, plain {plain / 2**20:.0f} MB")
        ratios.append(ours / plain)
    return max(ratios)


def _growth_in_a_process(of: str, dtype: str, arguments: Sequence[str]) -> int:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    command += [f"--of={of}", f"--dtype={dtype}"]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def growth(options: argparse.Namespace) -> int:
    """Bytes that one forward and backward takes at its highest, beyond its inputs."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    loss_of = head_loss if options.of == "ours" else plain_loss

    def run(tokens: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = loss_of(features[:tokens], weight, targets[:tokens])
        loss.backward()
        features.grad = weight.grad = None

    features = torch.randn(options.tokens, options.d_model, requires_grad=True)
    weight = torch.randn(options.vocab_size, options.d_model).mul_(0.02).requires_grad_()
    targets = torch.randint(options.vocab_size, (options.tokens,))
    run(1)  # threads and libraries are loaded
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
    before = memory("VmRSS")
    run(options.tokens)
    return memory("VmHWM") - before


def plain_loss(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The way without chunks."""
    return F.cross_entropy(F.linear(features, weight).float(), targets)


def memory(name: str) -> int:
    """Bytes of this process, as the kernel calls them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    main()
