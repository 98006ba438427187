"""What a model's shape is filled up with, and what is said about one that cannot be."""

import math
import re

import pytest
import torch

from model.config import LARGEST, PRESETS, ModelConfig, ModelConfigError
from model.transformer import Transformer


def problem_with(**options) -> str:
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig(**options).resolve(tokenizer_vocab_size=300)
    return str(caught.value)


def test_what_is_left_open_is_filled_in():
    config = ModelConfig(d_model=96, num_heads=6).resolve(tokenizer_vocab_size=300)
    assert config.num_kv_heads == 6
    assert config.d_ff == 256  # 8/3 of 96
    assert config.vocab_size == 320  # the next multiple of 64
    assert config.resolve(300) == config


def test_what_is_given_is_kept():
    config = ModelConfig(num_kv_heads=2, d_ff=100, vocab_size=301).resolve(300)
    assert (config.num_kv_heads, config.d_ff, config.vocab_size) == (2, 100, 301)


@pytest.mark.parametrize(
    "name", ["d_model", "num_layers", "num_heads", "num_kv_heads", "d_ff", "max_seq_len"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_a_count_below_one_is_named(name, value):
    assert f"{name} is {value}, it must be at least 1" in problem_with(**{name: value})


@pytest.mark.parametrize("name", LARGEST)
def test_a_size_beyond_any_model_is_named(name):
    # Even: such a width is asked for its divisors only once it is a width.
    assert f"{name} is 99999999998, it must be at most" in problem_with(**{name: 99999999998})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, "dropout is 1.0, it must be in [0, 1)"),
        ({"dropout": -0.1}, "dropout is -0.1, it must be in [0, 1)"),
        ({"dropout": math.nan}, "dropout is nan"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0, it must be positive"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"norm_eps": -1e-6}, "norm_eps is -1e-06, it must be positive"),
        ({"vocab_size": 299}, "vocab_size 299 is smaller than the tokenizer's 300"),
        (
            {"d_model": 250, "num_heads": 4},
            "d_model 250 does not divide by num_heads 4: use num_heads 1 or 5, or d_model 248",
        ),
        (
            {"d_model": 12, "num_heads": 4},
            "d_model 12 / num_heads 4 = 3 is odd, and rotary positions turn pairs: "
            "use num_heads 2 or 3, or d_model 16",
        ),
        (
            {"num_heads": 4, "num_kv_heads": 3},
            "num_heads 4 does not divide by num_kv_heads 3: use num_kv_heads 2 or 4",
        ),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_would(options, message):
    assert message in problem_with(**options)


@pytest.mark.parametrize(
    ("d_model", "num_heads"), [(6, 4), (10, 10), (250, 4), (12, 4), (9, 3), (7, 7), (1600, 24)]
)
def test_every_width_and_number_of_heads_that_is_suggested_works(d_model, num_heads):
    message = problem_with(d_model=d_model, num_heads=num_heads)
    heads, width = message.split(": use ")[1].rsplit("d_model ", 1)
    ModelConfig(d_model=int(width), num_heads=num_heads).resolve(300)
    for count in re.findall(r"\d+", heads):
        ModelConfig(d_model=d_model, num_heads=int(count)).resolve(300)


def test_all_problems_stand_in_one_message():
    message = problem_with(
        num_layers=0, d_ff=-1, vocab_size=5, dropout=2.0, rope_theta=-1.0, norm_eps=0.0
    )
    for name in ("num_layers", "d_ff", "vocab_size", "dropout", "rope_theta", "norm_eps"):
        assert name in message
    message = problem_with(d_model=250, num_heads=4, num_kv_heads=3, dropout=2.0)
    for problem in ("d_model 250", "num_kv_heads 3", "dropout is 2.0"):
        assert problem in message


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_model(name):
    with torch.device("meta"):
        Transformer(ModelConfig(**PRESETS[name]).resolve(300))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2-124m", 124e6), ("gpt2-350m", 350e6), ("gpt2-774m", 774e6), ("gpt2-1.5b", 1.5e9)],
)
def test_presets_have_the_parameters_that_their_names_say(name, parameters):
    with torch.device("meta"):
        model = Transformer(ModelConfig(**PRESETS[name]).resolve(50257))
    assert model.num_parameters() == pytest.approx(parameters, rel=0.05)
