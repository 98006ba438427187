"""The whole model against the implementations of the same architectures in `transformers`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from model.config import ModelConfig
from model.transformer import INITIAL_HEAD_STD, Transformer
from tests.model.small_models import lively_model, random_ids, small_config


def reference_of(model: Transformer) -> nn.Module:
    """The Qwen3 or Llama of `transformers` with the same shape and the same weights."""
    transformers = pytest.importorskip("transformers")
    config = model.config
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_weights,
        "attention_bias": False,
        "attn_implementation": "eager",
    }
    if config.qk_norm:
        reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    else:
        reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    ours = model.state_dict()
    weights = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "model.norm.weight": ours["final_norm.weight"],
        "lm_head.weight": ours["output_head.weight"],
    }
    query_rows = config.num_heads * config.head_dim
    key_rows = (config.num_kv_heads or config.num_heads) * config.head_dim
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        qkv = ours[f"{block}.attention.qkv.weight"]
        queries, keys, values = qkv.split([query_rows, key_rows, key_rows])
        gate, up = ours[f"{block}.feed_forward.gate_up.weight"].chunk(2)
        parts = {
            "input_layernorm": ours[f"{block}.attention_norm.weight"],
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": ours[f"{block}.attention.output.weight"],
            "post_attention_layernorm": ours[f"{block}.feed_forward_norm.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": ours[f"{block}.feed_forward.down.weight"],
        }
        if config.qk_norm:
            parts["self_attn.q_norm"] = ours[f"{block}.attention.query_norm.weight"]
            parts["self_attn.k_norm"] = ours[f"{block}.attention.key_norm.weight"]
        weights |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    reference.load_state_dict(weights)
    return reference.eval()


@pytest.mark.parametrize("tie_weights", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_logits_are_those_of_transformers_over_the_whole_context(
    qk_norm, num_kv_heads, tie_weights
):
    model = lively_model(
        qk_norm=qk_norm,
        num_kv_heads=num_kv_heads,
        tie_weights=tie_weights,
        max_seq_len=128,
        rope_theta=500.0,
        norm_eps=1e-3,
    )
    token_ids = random_ids(2, 128)
    with torch.no_grad():
        logits, expected = model(token_ids), reference_of(model)(token_ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_logits_are_those_of_transformers_with_an_odd_number_of_heads():
    model = lively_model(d_model=36, num_heads=3, num_kv_heads=3)
    token_ids = random_ids(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            model(token_ids), reference_of(model)(token_ids).logits, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_gradients_are_those_of_transformers(qk_norm):
    model = lively_model(qk_norm=qk_norm, tie_weights=True)
    reference = reference_of(model)
    token_ids, towards = random_ids(2, 32), torch.randn(2, 32, 96)
    (model(token_ids) * towards).mean().backward()
    (reference(token_ids).logits * towards).mean().backward()
    names = {
        "model.embed_tokens.weight": "embedding.weight",
        "model.norm.weight": "final_norm.weight",
        "model.layers.0.input_layernorm.weight": "blocks.0.attention_norm.weight",
        "model.layers.0.mlp.down_proj.weight": "blocks.0.feed_forward.down.weight",
        "model.layers.1.self_attn.o_proj.weight": "blocks.1.attention.output.weight",
    }
    for theirs, ours in names.items():
        grad, expected = model.get_parameter(ours).grad, reference.get_parameter(theirs).grad
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


def test_a_later_token_changes_no_earlier_logit():
    model, token_ids = lively_model(), random_ids(2, 32)
    with torch.no_grad():
        before = model(token_ids)
        token_ids[:, 17] = (token_ids[:, 17] + 1) % 90
        after = model(token_ids)
    torch.testing.assert_close(before[:, :17], after[:, :17], rtol=0, atol=1e-6)
    assert (before[:, 17:] - after[:, 17:]).abs().amax(dim=(0, 2)).min() > 1e-3


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ValueError, match="33 tokens, but max_seq_len is 32"):
        lively_model()(random_ids(1, 33))


def test_tied_weights_are_one_tensor_and_count_once():
    tied, untied = Transformer(small_config(tie_weights=True)), Transformer(small_config())
    assert tied.output_head.weight is tied.embedding.weight
    assert untied.output_head.weight is not untied.embedding.weight
    assert untied.num_parameters() - tied.num_parameters() == 96 * 32


def test_tied_weights_stay_tied_when_a_state_dict_is_loaded():
    model = Transformer(small_config(tie_weights=True))
    model.load_state_dict(lively_model(tie_weights=True).state_dict())
    assert model.output_head.weight is model.embedding.weight
    token_ids = random_ids(1, 8)
    assert torch.equal(model.eval()(token_ids), lively_model(tie_weights=True)(token_ids))


def test_num_parameters_is_the_sum_over_the_parts():
    attention = 32 * (4 + 2 * 2) * 8 + 32 * 32 + 2 * 8
    feed_forward = 3 * 32 * 48
    block = attention + feed_forward + 2 * 32
    assert Transformer(small_config()).num_parameters() == 2 * 96 * 32 + 2 * block + 32


def test_every_parameter_has_a_gradient_after_backward():
    model = lively_model()
    model(random_ids(2, 32)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def products(model: Transformer, batch: int, seq_len: int) -> dict[str, int]:
    """Operations of a forward and a backward pass as torch counts them, by operator."""
    token_ids = random_ids(batch, seq_len)
    with FlopCounterMode(display=False) as counter:
        model(token_ids).sum().backward()
    return {str(operator): n for operator, n in counter.get_flop_counts()["Global"].items()}


def attention_flops(model: Transformer, seq_len: int) -> int:
    """For a whole sequence, pair by pair: query x key, then weight x value, forward + backward."""
    config = model.config
    pairs = sum(query + 1 for query in range(seq_len))
    return 3 * 2 * 2 * config.head_dim * pairs * config.num_heads * config.num_layers


@pytest.mark.parametrize("tie_weights", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("seq_len", [32, 16, 1])
def test_flops_of_matrix_products_are_those_that_torch_counts(tie_weights, seq_len):
    model = lively_model(tie_weights=tie_weights)
    counted = products(model, batch=3, seq_len=seq_len)["aten.mm"]
    linear = seq_len * model.num_flops_per_token(seq_len) - attention_flops(model, seq_len)
    assert counted == 3 * linear


def test_flops_are_those_of_a_full_context_by_default():
    model = lively_model()
    assert model.num_flops_per_token() == model.num_flops_per_token(32)
    assert model.num_flops_per_token() > model.num_flops_per_token(16)


@pytest.mark.parametrize("num_layers", [1, 8])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_initial_weights_have_the_std_of_their_inputs_and_depth(num_layers, tie_weights):
    torch.manual_seed(0)
    shape = {"d_model": 128, "d_ff": 256, "num_layers": num_layers, "tie_weights": tie_weights}
    model = Transformer(small_config(**shape))
    stream = 1 / math.sqrt(128) if tie_weights else 1.0
    branch = stream / math.sqrt(2 * num_layers)
    expected = {
        "embedding.weight": stream,
        "output_head.weight": INITIAL_HEAD_STD,
        "attention.qkv.weight": 1 / math.sqrt(128),
        "attention.output.weight": branch / math.sqrt(128),
        "feed_forward.gate_up.weight": 1 / math.sqrt(128),
        "feed_forward.down.weight": branch / math.sqrt(256),
    }
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        (std,) = (std for end, std in expected.items() if name.endswith(end))
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel()), name


@pytest.mark.parametrize("tie_weights", [False, True])
def test_branches_add_to_the_stream_what_it_has(tie_weights):
    """Neither the embedding nor the branches drown the other, at any depth."""
    torch.manual_seed(0)
    shape = {"d_model": 128, "num_layers": 8, "tie_weights": tie_weights}
    model = Transformer(small_config(**shape)).eval()
    token_ids = random_ids(2, 32)
    growth = residual_stream_of(model, token_ids).std() / model.embedding(token_ids).std()
    assert 1.0 < growth.item() < 2.0


def test_a_fresh_model_is_certain_of_nothing():
    torch.manual_seed(0)
    model = Transformer(small_config(tie_weights=False))
    entropy = torch.distributions.Categorical(logits=model(random_ids(2, 32))).entropy()
    assert entropy.mean().item() == pytest.approx(math.log(96), rel=0.01)


def test_dropout_acts_in_training_alone():
    model, token_ids = lively_model(dropout=0.5), random_ids(2, 32)
    plain: Tensor = lively_model(dropout=0.0)(token_ids)
    assert torch.equal(model.eval()(token_ids), plain)
    model.train()
    first, second = model(token_ids), model(token_ids)
    assert not torch.equal(first, second)
    assert not torch.equal(first, plain)


def residual_stream_of(model: Transformer, token_ids: Tensor) -> Tensor:
    """What the final norm reads."""
    streams: list[Tensor] = []
    model.final_norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    model(token_ids)
    return streams[0]


def test_dropout_reaches_the_embedding():
    model = lively_model(dropout=0.999999).train()
    assert not residual_stream_of(model, random_ids(1, 8)).any()


def test_dropout_reaches_both_branches_of_every_block():
    model, token_ids = lively_model(dropout=0.999999).train(), random_ids(1, 8)
    model.dropout.eval()
    assert torch.equal(residual_stream_of(model, token_ids), model.embedding(token_ids))


def test_names_of_weights_are_plain():
    names = set(lively_model().state_dict())
    assert {
        "embedding.weight",
        "output_head.weight",
        "final_norm.weight",
        "blocks.1.attention.qkv.weight",
        "blocks.1.attention.query_norm.weight",
        "blocks.1.feed_forward.gate_up.weight",
    } <= names
    assert len(names) == 3 + 2 * 8


def test_row_blocks_name_every_matrix_of_the_blocks_with_the_maps_that_it_holds():
    config = ModelConfig(d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
    model = Transformer(config.resolve(100))
    blocks = model.row_blocks()
    named = dict(model.named_parameters())
    inside = {name for name, p in named.items() if p.dim() == 2 and name.startswith("blocks.")}
    assert blocks.keys() == inside
    assert all(sum(rows) == named[name].shape[0] for name, rows in blocks.items())
    assert blocks["blocks.1.attention.qkv.weight"] == (32, 16, 16)
    assert blocks["blocks.0.feed_forward.gate_up.weight"] == (48, 48)
    assert blocks["blocks.0.feed_forward.down.weight"] == (32,)
