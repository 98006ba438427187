"""AdamW against torch's fused form, bit by bit, and against the formula written out in float64."""

import io
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from optim.adamw import AdamW, decay_groups

fused_of_torch = partial(torch.optim.AdamW, fused=True)
OTHER_FORMS = [partial(torch.optim.AdamW, foreach=foreach) for foreach in (False, True)]

SHAPES = [(33, 17), (64,), (), (0,), (3, 0, 2), (2, 3, 4, 5), (1,), (1000, 7)]


def make_params(shapes=SHAPES, dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def make_groups(params: list[nn.Parameter]) -> list[dict]:
    return [
        {"params": params[:3], "weight_decay": 0.1, "betas": (0.9, 0.95)},
        {"params": params[3:6], "weight_decay": 0.0, "eps": 1e-6},
        {"params": params[6:], "lr": 3e-4},
    ]


def set_gradients(params: list[nn.Parameter], seed: int, share_without: float = 0.0) -> None:
    """Fill in gradients of very unequal size; leave out a share of them."""
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator) * 10.0 ** (i % 5 - 3)
        left_out = torch.rand((), generator=generator).item() < share_without
        param.grad = None if left_out else grad.to(param.dtype)


def assert_same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def assert_close(left: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def steps_in_double(
    param: Tensor, grads: list[Tensor], lr: float, beta1: float, beta2: float, eps: float, wd: float
) -> Tensor:
    """Of the formula of AdamW's docstring (Algorithm 2 of the paper), line by line, in float64."""
    param = param.detach().double()
    m = torch.zeros_like(param)
    v = torch.zeros_like(param)
    for t, grad in enumerate(grads, start=1):
        g = grad.double()
        param = param * (1 - lr * wd)
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g**2
        param = param - lr / (1 - beta1**t) * m / (v.sqrt() / math.sqrt(1 - beta2**t) + eps)
    return param


@pytest.mark.parametrize("share_without", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fifty_steps_are_those_of_torchs_fused_form_to_the_last_bit(dtype, share_without):
    ours, theirs = make_params(dtype=dtype), make_params(dtype=dtype)
    optimizer = AdamW(make_groups(ours), lr=1e-3)
    reference = fused_of_torch(make_groups(theirs), lr=1e-3)
    for step in range(50):
        for params in (ours, theirs):
            set_gradients(params, seed=step, share_without=share_without)
        for group, reference_group in zip(
            optimizer.param_groups, reference.param_groups, strict=True
        ):
            group["lr"] = reference_group["lr"] = group["lr"] * (1 + 0.1 * math.sin(step))
        optimizer.step()
        reference.step()
        assert_same_bits(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert optimizer.state[a]["step"] == reference.state[b]["step"].item()
        assert torch.equal(optimizer.state[a]["exp_avg"], reference.state[b]["exp_avg"])
        assert torch.equal(optimizer.state[a]["exp_avg_sq"], reference.state[b]["exp_avg_sq"])


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_torchs_other_forms_agree_up_to_rounding(form):
    ours, theirs = make_params(), make_params()
    optimizer = AdamW(make_groups(ours), lr=1e-3)
    reference = form(make_groups(theirs), lr=1e-3)
    for step in range(50):
        for params in (ours, theirs):
            set_gradients(params, seed=step)
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, 1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        assert_close(
            [optimizer.state[param][name] for param in ours],
            [reference.state[param][name] for param in theirs],
            1e-6,
        )


@pytest.mark.parametrize(
    "shapes", [[(3_000_017,), (1009, 1013)], [(7,)] * 1000], ids=["few long", "many small"]
)
def test_lists_of_any_length_follow_the_formula_and_are_torchs_to_the_last_bit(shapes):
    ours, theirs = make_params(shapes), make_params(shapes)
    start = [param.detach().clone() for param in ours]
    optimizer = AdamW(ours, lr=0.01, weight_decay=0.1)
    reference = fused_of_torch(theirs, lr=0.01, weight_decay=0.1)
    history = []
    for step in range(2):
        for params in (ours, theirs):
            set_gradients(params, seed=step)
        history.append([param.grad for param in ours])
        optimizer.step()
        reference.step()
    assert_same_bits(ours, theirs)
    wanted = [
        steps_in_double(first, grads, 0.01, 0.9, 0.999, 1e-8, 0.1)
        for first, *grads in zip(start, *history, strict=True)
    ]
    assert_close([param.double() for param in ours], wanted, 1e-6)


def test_transposed_parameters_are_updated_as_torch_does():
    # 48 elements, whole vectors of 16: the kernel rounds what is left over at an end otherwise, and
    # ours and torch's do not end with the same elements here.
    ours, theirs = ([nn.Parameter(p.detach().t()) for p in make_params([(8, 6)])] for _ in range(2))
    optimizer, reference = AdamW(ours), fused_of_torch(theirs)
    for step in range(3):
        for params in (ours, theirs):
            set_gradients(params, seed=step)
            for param in params:  # torch's is right only where the gradient has the same strides
                assert param.grad is not None
                param.grad = torch.empty_like(param).copy_(param.grad)
        optimizer.step()
        reference.step()
    assert not ours[0].is_contiguous()
    assert_same_bits(ours, theirs)


def beside_others(tensor: Tensor) -> Tensor:
    """The tensor as every second column of a larger one, zeros elsewhere."""
    larger = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    return larger[..., ::2].copy_(tensor)


# Equal values, laid out otherwise in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "rolled": lambda tensor: tensor.movedim(0, -1).contiguous().movedim(-1, 0),
    "with gaps": beside_others,
    "transposed with gaps": lambda tensor: beside_others(tensor.transpose(0, -1)).transpose(0, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("param_layout", LAYOUTS)
def test_layout_in_memory_changes_no_number(param_layout, grad_layout, dtype):
    plain = make_params([(7, 6), (5, 3, 4)], dtype=dtype)
    laid_out = [nn.Parameter(LAYOUTS[param_layout](param.detach())) for param in plain]
    optimizer, reference = AdamW(laid_out, lr=0.1), AdamW(plain, lr=0.1)
    for step in range(3):
        set_gradients(plain, seed=step)
        for param, twin in zip(laid_out, plain, strict=True):
            assert twin.grad is not None
            param.grad = LAYOUTS[grad_layout](twin.grad)
            assert torch.equal(param.grad, twin.grad)
        optimizer.step()
        reference.step()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for param, twin in zip(laid_out, plain, strict=True):
        assert param.grad is not None
        assert twin.grad is not None
        assert torch.equal(param.grad, twin.grad)
        for a, b in [(param, twin)] + [
            (optimizer.state[param][name], reference.state[twin][name])
            for name in ("exp_avg", "exp_avg_sq")
        ]:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_what_lies_between_the_elements_of_a_parameter_is_left_alone():
    larger = torch.ones(50, 20)
    param = nn.Parameter(larger[:, :10])
    param.grad = torch.ones(50, 10)
    AdamW([param], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(larger[:, :10], torch.full((50, 10), 0.9))
    assert torch.equal(larger[:, 10:], torch.ones(50, 10))


def test_gradient_that_is_one_number_expanded_counts_for_every_element():
    (expanded,), (full,) = make_params([(50, 20)]), make_params([(50, 20)])
    expanded.grad = torch.tensor(0.5).expand(50, 20)
    full.grad = torch.full((50, 20), 0.5)
    for param in (expanded, full):
        AdamW([param]).step()
    assert torch.equal(expanded, full)


def test_moments_that_were_saved_in_another_layout_go_on():
    straight = make_params([(7, 6)])
    first = AdamW(straight)
    set_gradients(straight, seed=0)
    first.step()
    resumed = [nn.Parameter(LAYOUTS["transposed"](straight[0].detach()))]
    second = AdamW(resumed)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    for step in (1, 2):
        for params in (straight, resumed):
            set_gradients(params, seed=step)
        first.step()
        second.step()
    assert second.state[resumed[0]]["exp_avg"].stride() != resumed[0].stride()
    assert_close(resumed, straight, 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_steps_follow_the_formula(dtype, tolerance):
    options = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
    params = make_params(dtype=dtype)
    start = [param.detach().clone() for param in params]
    grads: list[list[Tensor]] = [[] for _ in params]
    optimizer = AdamW(params, betas=(0.8, 0.95), **options)
    for step in range(20):
        set_gradients(params, seed=step)
        for param, history in zip(params, grads, strict=True):
            assert param.grad is not None
            history.append(param.grad)  # a new tensor each time
        optimizer.step()
    wanted = [
        steps_in_double(first, history, 0.01, 0.8, 0.95, 1e-8, 0.1)
        for first, history in zip(start, grads, strict=True)
    ]
    assert_close([param.double() for param in params], wanted, tolerance)


def test_decay_does_not_pass_through_the_moments():
    params = make_params([(4, 4)])
    before = params[0].detach().clone()
    params[0].grad = torch.zeros(4, 4)
    optimizer = AdamW(params, lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(params[0], before * 0.95)
    assert not optimizer.state[params[0]]["exp_avg"].any()


def test_parameter_without_a_gradient_neither_moves_nor_decays_nor_gets_a_state():
    params = make_params([(4, 4), (4,)])
    before = params[0].detach().clone()
    params[1].grad = torch.ones(4)
    optimizer = AdamW(params, lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(params[0], before)
    assert list(optimizer.state) == [params[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_have_float32_moments_and_arithmetic(dtype):
    half = make_params(dtype=dtype)
    optimizer = AdamW(half, lr=0.01, weight_decay=0.1)
    exact = [nn.Parameter(param.detach().float()) for param in half]
    reference = AdamW(exact, lr=0.01, weight_decay=0.1)
    for step in range(10):
        set_gradients(half, seed=step)
        for param, copy in zip(half, exact, strict=True):
            copy.data.copy_(param)  # starts from the rounded value, as the half one must
            assert param.grad is not None
            copy.grad = param.grad.float()
        optimizer.step()
        reference.step()
        for param, copy in zip(half, exact, strict=True):
            assert torch.equal(param, copy.to(dtype))
            for name in ("exp_avg", "exp_avg_sq"):
                assert optimizer.state[param][name].dtype == torch.float32
                assert torch.equal(optimizer.state[param][name], reference.state[copy][name])


def test_second_moment_of_a_bfloat16_parameter_forgets():
    """In bfloat16 0.999 v rounds back to v: after one large gradient the steps stay small."""
    (param,) = make_params([(16,)], dtype=torch.bfloat16)
    optimizer = AdamW([param], weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    first = optimizer.state[param]["exp_avg_sq"].clone()
    for _ in range(100):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    wanted = first * 0.999**100
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], wanted, rtol=1e-5, atol=0.0)


def saved_and_loaded(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def straight_and_resumed(
    writer: Callable, reader: Callable
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Six steps of `writer`; three of it and three of `reader`, which loads what it saved."""
    straight = make_params()
    first = writer(make_groups(straight), lr=2e-3)
    for step in range(3):
        set_gradients(straight, seed=step, share_without=0.2)
        first.step()
    resumed = [nn.Parameter(param.detach().clone()) for param in straight]
    second = reader(make_groups(resumed), lr=77.0)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    if reader is fused_of_torch:
        for group in second.param_groups:
            group["fused"] = True  # torch's takes over that a group of ours has no such option
    for step in range(3, 6):
        for params in (straight, resumed):
            set_gradients(params, seed=step)
        first.step()
        second.step()
    return straight, resumed


@pytest.mark.parametrize("writer", [AdamW, fused_of_torch], ids=["ours", "torch"])
@pytest.mark.parametrize("reader", [AdamW, fused_of_torch], ids=["ours", "torch"])
def test_state_written_by_one_adamw_continues_in_the_other(writer, reader):
    assert_same_bits(*straight_and_resumed(writer, reader))


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_state_continues_up_to_rounding_between_ours_and_torchs_other_forms(form):
    for writer, reader in ((AdamW, form), (form, AdamW)):
        straight, resumed = straight_and_resumed(writer, reader)
        assert_close(straight, resumed, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_moments_of_half_precision_parameters_survive_loading(dtype):
    params = make_params(dtype=dtype)
    optimizer = AdamW(params)
    set_gradients(params, seed=0, share_without=0.3)
    optimizer.step()
    other = AdamW(make_params(dtype=dtype))
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for param, other_param in zip(params, other.param_groups[0]["params"], strict=True):
        assert (param in optimizer.state) == (other_param in other.state)
        for name, value in optimizer.state.get(param, {}).items():
            loaded = other.state[other_param][name]
            assert torch.equal(loaded, value) if name != "step" else loaded == value
            assert name == "step" or loaded.dtype == torch.float32


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_state_of_an_adamw_with_options_that_ours_lacks_is_refused(option):
    saved = torch.optim.AdamW(make_params()).state_dict()
    saved["param_groups"][0][option] = True
    with pytest.raises(ValueError, match=option):
        AdamW(make_params()).load_state_dict(saved)


def test_state_for_other_groups_is_refused():
    saved = AdamW(make_groups(make_params())).state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        AdamW(make_params()).load_state_dict(saved)


def test_closure_computes_gradients_before_the_step_and_its_loss_is_returned():
    (param,) = make_params([(5,)])
    optimizer = AdamW([param], lr=0.1, weight_decay=0.0)
    before = param.detach().clone()

    def closure() -> float:
        loss = (param * 2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(2 * before.sum().item())
    torch.testing.assert_close(param.detach(), before - 0.1)
    assert optimizer.step() is None


def test_gradient_scaler_drives_it_and_skips_its_step_on_overflow():
    (param,) = make_params([(5,)])
    optimizer = AdamW([param])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((param * math.inf).sum()).backward()
    before = param.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, before)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_that_a_tensor_says_to_leave_out_change_no_bit_and_are_not_counted(dtype):
    """Against the same steps without those left out; of which one is the first."""
    ours, theirs = ([nn.Parameter(p.detach().t()) for p in make_params([(8, 6)])] for _ in "ab")
    for params in (ours, theirs):
        params += make_params()
        for param in params:
            param.data = param.data.to(dtype)
    optimizer, reference = AdamW(ours, lr=0.01), AdamW(theirs, lr=0.01)
    left_out = {0, 3, 4}
    for step in range(7):
        for params in (ours, theirs):
            set_gradients(params, seed=step, share_without=0.2)
        optimizer.found_inf = torch.tensor(float(step in left_out))
        if step not in left_out:
            reference.step()
        else:
            for param in ours:
                if param.grad is not None:
                    param.grad.fill_(math.nan)
        optimizer.step()
        assert_same_bits(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        for name, value in reference.state[b].items():
            assert torch.equal(optimizer.state[a][name], value)


def test_a_state_that_counts_in_plain_numbers_goes_on():
    """As ours did before it counted on the device."""
    params, others = make_params(), make_params()
    optimizer, other = AdamW(params), AdamW(others)
    for step in range(4):
        for some in (params, others):
            set_gradients(some, seed=step)
        optimizer.step()
        other.step()
        for state in other.state.values():
            state["step"] = int(state["step"])
    saved = saved_and_loaded(other.state_dict())
    other = AdamW(others)
    other.load_state_dict(saved)
    for some in (params, others):
        set_gradients(some, seed=4)
    optimizer.step()
    other.step()
    assert_same_bits(params, others)
    assert {int(state["step"]) for state in other.state.values()} == {5}


def test_steps_read_nothing_back_from_the_device():
    """The meta device has no values: whatever asks for one, and would wait for a GPU, raises."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer = AdamW(params)
    for found_inf in (None, torch.empty((), device="meta")):
        optimizer.found_inf = found_inf
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert optimizer.state[params[0]]["step"].device.type == "meta"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr -0.1"),
        ({"lr": math.nan}, "lr nan"),
        ({"lr": math.inf}, "lr inf"),
        ({"eps": -1e-8}, "eps -1e-08"),
        ({"weight_decay": -1.0}, "weight_decay -1.0"),
        ({"betas": (1.0, 0.999)}, "beta1 1.0"),
        ({"betas": (0.9, -0.5)}, "beta2 -0.5"),
    ],
)
def test_option_outside_its_range_is_refused_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(make_params(), **options)
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": make_params(), **options}])


def test_sparse_gradient_is_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW(embedding.parameters()).step()


def test_complex_parameter_is_refused():
    param = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="complex"):
        AdamW([param]).step()


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


def test_matrices_decay_and_vectors_do_not():
    model = TiedModel()
    decayed, undecayed = decay_groups(model.named_parameters(), weight_decay=0.1)
    assert decayed["weight_decay"] == 0.1
    assert undecayed["weight_decay"] == 0.0
    ids = {id(param) for param in decayed["params"]}
    assert ids == {id(model.embedding.weight), id(model.hidden.weight)}
    assert {param.ndim for param in undecayed["params"]} == {0, 1}


def test_tied_weight_is_in_exactly_one_group_once():
    model = TiedModel()
    named = list(model.named_parameters(remove_duplicate=False))
    assert len(named) == 7
    groups = decay_groups(named, weight_decay=0.1)
    grouped = [id(param) for group in groups for param in group["params"]]
    assert sorted(grouped) == sorted({id(param) for _, param in named})


def test_frozen_parameters_are_in_no_group():
    model = TiedModel()
    model.hidden.requires_grad_(False)
    groups = decay_groups(model.named_parameters(), weight_decay=0.1)
    grouped = {id(param) for group in groups for param in group["params"]}
    assert not grouped & {id(param) for param in model.hidden.parameters()}
    assert len(grouped) == 4


def test_group_without_parameters_is_omitted():
    bias_free = nn.Linear(3, 3, bias=False)
    (group,) = decay_groups(bias_free.named_parameters(), weight_decay=0.1)
    assert group["weight_decay"] == 0.1
    assert decay_groups([], weight_decay=0.1) == []
