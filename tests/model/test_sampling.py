"""Choosing a token by the law that the options describe, and one text with the cache or without it.

The reference of every generation test is the plain rule: forward the row's window alone, without
cache, and read the logits after its last token.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from model import sampling
from model.config import ModelConfigError
from model.sampling import SamplingOptions, choose, generate, window_start
from model.transformer import Transformer
from tests.model.small_models import lively_model, random_ids

GREEDY = SamplingOptions(temperature=0.0)
CONTEXT = 32
LENGTHS = [1, 2, 17, CONTEXT - 1, CONTEXT, CONTEXT + 1, 10 * CONTEXT + 5]

# After some token: B 50 %, C 30 %, D 15 %, E 5 %, in an order that is not that of the ids.
LAW = {"D": 0.15, "B": 0.5, "E": 0.05, "C": 0.3}


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random_ids(length, seed=seed + length).tolist()


def continue_all(
    model: Transformer, prompts: Sequence[list[int]], max_new_tokens: int = 48, **options
) -> list[list[int]]:
    """The new ids of every row, without the Nones of finished ones."""
    options = {"options": GREEDY} | options
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, prompts, max_new_tokens=max_new_tokens, **options):
        for row, token in zip(rows, step, strict=True):
            row += [] if token is None else [token]
    return rows


@torch.no_grad()
def logits_after(model: Transformer, tokens: list[int]) -> Tensor:
    """What the model says after its window of these tokens."""
    window = tokens[window_start(len(tokens), CONTEXT) :]
    return model(torch.tensor([window]))[0, -1]


def continue_plainly(model: Transformer, prompt: list[int], max_new_tokens: int = 48) -> list[int]:
    """Greedy continuation by the plain rule."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(logits_after(model, tokens).argmax()))
    return tokens[len(prompt) :]


def draw(options: SamplingOptions, count: int, law: dict[str, float] = LAW) -> Counter[str]:
    logits = torch.tensor(list(law.values())).log() + 3.0
    generator = torch.Generator().manual_seed(0)
    names = list(law)
    return Counter(names[choose(logits, options, generator)] for _ in range(count))


def assert_frequencies(drawn: Counter[str], expected: dict[str, float]) -> None:
    """Same support, and every frequency within 4 sigma of the expected law."""
    assert set(drawn) == set(expected)
    count, mass = drawn.total(), sum(expected.values())
    for name, weight in expected.items():
        probability = weight / mass
        sigma = math.sqrt(probability * (1 - probability) / count)
        assert abs(drawn[name] / count - probability) <= 4 * sigma, name


def only(*names: str) -> dict[str, float]:
    return {name: LAW[name] for name in names}


def test_without_cuts_tokens_are_drawn_by_their_probability():
    assert_frequencies(draw(SamplingOptions(temperature=1.0), 4000), LAW)


@pytest.mark.parametrize(
    ("top_p", "support"), [(0.01, "B"), (0.4, "B"), (0.6, "BC"), (0.85, "BCD"), (1.0, "BCDE")]
)
def test_top_p_keeps_the_token_that_crosses_it(top_p, support):
    drawn = draw(SamplingOptions(temperature=1.0, top_p=top_p), 2000)
    assert_frequencies(drawn, only(*support))


@pytest.mark.parametrize(
    ("top_k", "support"), [(1, "B"), (2, "BC"), (3, "BCD"), (4, "BCDE"), (99, "BCDE")]
)
def test_top_k_keeps_the_k_most_probable(top_k, support):
    drawn = draw(SamplingOptions(temperature=1.0, top_k=top_k), 2000)
    assert_frequencies(drawn, only(*support))


def test_top_p_counts_the_mass_that_top_k_left():
    # Of B and C alone B has 62.5 %: 0.6 is reached with B, though B has 50 % of all.
    assert set(draw(SamplingOptions(temperature=1.0, top_k=2, top_p=0.6), 500)) == {"B"}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_the_power_of_the_law(temperature):
    expected = {name: weight ** (1 / temperature) for name, weight in LAW.items()}
    assert_frequencies(draw(SamplingOptions(temperature=temperature), 4000), expected)


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    assert set(draw(SamplingOptions(temperature=temperature), 50)) == {"B"}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("other", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9}])
def test_temperature_zero_is_top_k_one_whatever_the_seed(seed, other):
    model, prompt = lively_model(), make_prompt(17)
    greedy = continue_all(model, [prompt], options=SamplingOptions(0.0, **other), seed=seed)
    top_one = continue_all(model, [prompt], options=SamplingOptions(0.8, top_k=1), seed=seed)
    assert greedy == top_one == [continue_plainly(model, prompt)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, it must be 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0, it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0, it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5, it must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_an_option_without_a_meaning_is_refused(options, message):
    with pytest.raises(ModelConfigError, match=message):
        SamplingOptions(**options)


def test_all_refused_options_stand_in_one_message():
    with pytest.raises(ModelConfigError, match=r"temperature is -1.*top_k is 0.*top_p is 2"):
        SamplingOptions(temperature=-1, top_k=0, top_p=2)


@pytest.mark.parametrize("context", [1, 2, 7, 8, 32, 100])
def test_a_window_is_full_to_an_eighth_and_moves_an_eighth_at_a_time(context):
    step = max(1, context // 8)
    starts = [window_start(length, context) for length in range(1, 5 * context)]
    assert all(start == 0 for start in starts[:context])
    moves = {later - earlier for earlier, later in itertools.pairwise(starts)}
    assert moves == {0, step} if context > 1 else {1}
    for length, start in enumerate(starts, start=1):
        if start:
            assert context - step < length - start <= context


def seen_logits(monkeypatch, model, prompts, forced: list[list[int]], use_cache: bool) -> Tensor:
    """Logits of every step and row, (steps, rows, vocab), while the choice is forced."""
    seen: list[Tensor] = []

    def record_and_force(logits, options, generator):
        step, row = divmod(len(seen), len(prompts))
        seen.append(logits)
        return forced[row][step]

    monkeypatch.setattr(sampling, "choose", record_and_force)
    continue_all(model, prompts, max_new_tokens=len(forced[0]), use_cache=use_cache)
    return torch.stack(seen).unflatten(0, (-1, len(prompts)))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_logits_of_every_step_are_those_of_a_full_forward_pass(monkeypatch, use_cache, qk_norm):
    model = lively_model(qk_norm=qk_norm)
    prompts = [make_prompt(length) for length in LENGTHS]
    forced = [random_ids(2 * CONTEXT, seed=99 + row).tolist() for row in range(len(prompts))]
    logits = seen_logits(monkeypatch, model, prompts, forced, use_cache)
    for row, prompt in enumerate(prompts):
        for step in range(2 * CONTEXT):
            expected = logits_after(model, prompt + forced[row][:step])
            torch.testing.assert_close(logits[step, row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_ids_are_those_of_the_plain_rule(length, use_cache):
    model, prompt = lively_model(), make_prompt(length)
    expected = continue_plainly(model, prompt)
    assert len(set(expected)) > 8, "the model repeats itself: too easy a test"
    assert continue_all(model, [prompt], use_cache=use_cache) == [expected]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(1.0)], ids=["greedy", "drawn"])
def test_a_prompt_goes_on_alike_alone_and_in_a_batch_of_any_order(options, use_cache):
    model = lively_model()
    prompts = [make_prompt(length) for length in LENGTHS]
    how = {"options": options, "use_cache": use_cache}
    alone = [continue_all(model, [prompt], **how)[0] for prompt in prompts]
    assert continue_all(model, prompts, **how) == alone
    assert continue_all(model, prompts[::-1], **how) == alone[::-1]


def test_the_filling_of_shorter_rows_may_equal_a_real_token():
    # Rows are filled up with id 0, which here is also what the prompts consist of.
    model, short, long = lively_model(), [0, 0], [0] * 20
    alone = [continue_plainly(model, short), continue_plainly(model, long)]
    assert continue_all(model, [short, long]) == alone


def test_two_generations_one_after_another_share_nothing():
    model, prompt = lively_model(), make_prompt(17)
    first = continue_all(model, [prompt])
    continue_all(model, [make_prompt(40)])
    assert continue_all(model, [prompt]) == first


def test_a_context_of_one_token_works():
    model = lively_model(max_seq_len=1)
    ids = continue_all(model, [[5, 6, 7]], max_new_tokens=10)
    assert ids == continue_all(model, [[7]], max_new_tokens=10)


def test_tied_models_generate_alike_with_and_without_cache():
    model, prompt = lively_model(tie_weights=True, num_kv_heads=1), make_prompt(30)
    assert continue_all(model, [prompt]) == continue_all(model, [prompt], use_cache=False)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_finished_row_stays_finished_while_others_go_on(use_cache):
    model = lively_model()
    prompts = [make_prompt(length) for length in (5, 17, 40)]
    endless = continue_all(model, prompts)
    # A token that ends the first row early and the others later or never.
    stop_id = next(t for t in endless[0][3:] if t not in endless[1][:12] + endless[0][:3])
    expected = [row[: row.index(stop_id)] if stop_id in row else row for row in endless]
    assert len(expected[0]) < len(expected[1])
    assert continue_all(model, prompts, stop_id=stop_id, use_cache=use_cache) == expected


def test_a_row_that_finished_yields_none_from_then_on():
    model, prompts = lively_model(), [make_prompt(5), make_prompt(17)]
    endless = continue_all(model, prompts)
    stop_id = next(t for t in endless[0] if t not in endless[1])
    steps = list(generate(model, prompts, max_new_tokens=48, options=GREEDY, stop_id=stop_id))
    end = endless[0].index(stop_id)
    assert [step[0] for step in steps] == endless[0][:end] + [None] * (48 - end)
    assert [step[1] for step in steps] == endless[1]


def test_generation_ends_when_all_rows_have_finished():
    model, prompt = lively_model(), make_prompt(5)
    endless = continue_all(model, [prompt])[0]
    steps = list(
        generate(model, [prompt] * 3, max_new_tokens=48, options=GREEDY, stop_id=endless[7])
    )
    assert len(steps) == endless.index(endless[7])


def test_without_a_stop_id_generation_goes_to_the_end():
    assert len(continue_all(lively_model(), [[1]], max_new_tokens=70)[0]) == 70


def test_the_same_seed_draws_the_same_text_and_another_seed_another():
    model, prompt, options = lively_model(), make_prompt(5), SamplingOptions(1.0)
    first, again, other = (
        continue_all(model, [prompt], options=options, seed=seed) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_no_two_rows_draw_alike():
    model, options = lively_model(), SamplingOptions(1e9)  # all tokens equally probable
    prompts = [make_prompt(5), make_prompt(5), make_prompt(6), make_prompt(5)]
    rows = continue_all(model, prompts, options=options, seed=7)
    assert len(set(map(tuple, rows))) == len(prompts)


@pytest.mark.parametrize("seed", [-1, 0, 2**80])
def test_any_integer_is_a_seed(seed):
    assert continue_all(lively_model(), [[1]], options=SamplingOptions(1.0), seed=seed)


def test_the_global_random_state_is_neither_read_nor_written():
    model, options = lively_model(), SamplingOptions(1.0)
    torch.manual_seed(1)
    first = continue_all(model, [[3]], options=options)
    state = torch.get_rng_state()
    assert continue_all(model, [[3]], options=options) == first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(50.0)], ids=["greedy", "drawn"])
def test_ids_that_only_pad_the_vocabulary_are_never_chosen(options):
    model = lively_model()
    with torch.no_grad():
        # The padding rows get the largest logits of all.
        model.output_head.weight[90:] = 3 * model.output_head.weight[:6]
    padded = continue_all(model, [make_prompt(5)], options=options, max_new_tokens=200)[0]
    cut = continue_all(model, [make_prompt(5)], options=options, max_new_tokens=200, vocab_size=90)[
        0
    ]
    assert max(padded) >= 90
    assert max(cut) < 90


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "a prompt is empty"),
        ([], {}, "a prompt is empty"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens is -1"),
    ],
)
def test_what_cannot_be_continued_is_refused_at_the_call(prompts, options, message):
    options = {"max_new_tokens": 5, "options": GREEDY} | options
    with pytest.raises(ModelConfigError, match=message):
        generate(lively_model(), prompts, **options)


def test_no_new_tokens_may_be_asked_for():
    assert continue_all(lively_model(), [[1], [2]], max_new_tokens=0) == [[], []]


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_rows_first_token_alone_is_chosen_among_its_first_ids(use_cache):
    model, prompts = lively_model(), [make_prompt(5), make_prompt(9)]
    free = continue_all(model, prompts, use_cache=use_cache)
    wanted = [3, 7, 11]
    rows = continue_all(model, prompts, first_ids=[wanted, None], use_cache=use_cache)
    assert rows[1] == free[1]
    logits = logits_after(model, prompts[0])[wanted]
    assert rows[0][0] == wanted[int(logits.argmax())]
    assert rows[0][0] != free[0][0]
    assert rows[0][1:] == continue_all(model, [[*prompts[0], rows[0][0]]])[0][:-1]
