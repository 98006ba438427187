"""Models that compute in milliseconds and still say something worth comparing.

Freshly initialised weights are so small that attention is uniform and one token always wins, and
then a wrong mask or position goes unnoticed. Here weights are large, and norm weights differ.
"""

from typing import Any

import torch

from model.config import ModelConfig
from model.transformer import Transformer

SHAPE: dict[str, Any] = {
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 48,
    "max_seq_len": 32,
    "vocab_size": 96,
    "tie_weights": False,
}


def small_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**(SHAPE | changes)).resolve(tokenizer_vocab_size=90)


def lively_model(seed: int = 0, **changes: Any) -> Transformer:
    """A model in evaluation mode whose attention is sharp and whose greedy output varies."""
    model = Transformer(small_config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    return model.eval()


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids below 90, as a tokenizer of 90 would produce."""
    return torch.randint(0, 90, shape, generator=torch.Generator().manual_seed(seed))
