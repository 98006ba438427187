"""The device's judgement of a step against a plain one, and what the host reads of it, and when."""

import math
import random
import statistics

import pytest
import torch

from training.bad_steps import (
    NORMS_NEEDED,
    NORMS_REMEMBERED,
    BadSteps,
    complaint,
    is_search_for_a_scale,
)
from training.step_reports import Report, Reports

CPU = torch.device("cpu")


def norms(count: int) -> list[float]:
    """Mostly around 1, some a spike, some not finite."""
    draw = random.Random(0)
    special = [20.0, math.inf, math.nan]
    drawn = [
        draw.choice(special) if draw.random() < 0.2 else draw.gauss(1, 0.1) for _ in range(count)
    ]
    return torch.tensor(drawn).tolist()


@pytest.mark.parametrize("spike_factor", [0.0, 3.0])
def test_a_step_is_bad_when_it_is_not_finite_or_a_spike_against_the_median_of_those_before(
    spike_factor,
):
    bad_steps = BadSteps(spike_factor, CPU)
    recent: list[float] = []
    kinds = set()
    for norm in norms(3 * NORMS_REMEMBERED):
        is_bad, median = bad_steps.judge(torch.tensor(2.0), torch.tensor(norm))
        is_compared = spike_factor > 0 and len(recent) >= NORMS_NEEDED
        middle = statistics.median(recent) if is_compared else math.nan
        is_spike = norm > spike_factor * middle
        assert is_bad.item() == (not math.isfinite(norm) or is_spike)
        assert median.item() == pytest.approx(middle, nan_ok=True)
        kinds.add((is_spike, math.isfinite(norm)))
        bad_steps.remember(torch.tensor(norm))
        recent = [*recent, *([norm] if math.isfinite(norm) else [])][-NORMS_REMEMBERED:]
        assert bad_steps.recent == recent
    assert len(kinds) == (4 if spike_factor else 2)  # infinity is a spike, too


def test_a_loss_that_is_not_finite_is_bad_whatever_the_norm():
    bad_steps = BadSteps(0.0, CPU)
    for loss in (math.nan, math.inf):
        assert bad_steps.judge(torch.tensor(loss), torch.tensor(1.0))[0] == 1


def test_norms_that_were_saved_are_compared_with_on():
    first, second = BadSteps(3.0, CPU), BadSteps(3.0, CPU)
    for norm in norms(40):
        first.remember(torch.tensor(norm))
    second.recent = first.recent
    assert second.recent == first.recent != []
    one = torch.tensor(1.0)
    assert torch.equal(*(each.judge(one, one)[1] for each in (first, second)))


def test_a_judgement_reads_nothing_back_from_the_device():
    """The meta device has no values: whatever asks for one, and would wait for a GPU, raises."""
    meta = torch.device("meta")
    bad_steps, reports = BadSteps(3.0, meta), Reports(meta)
    number = torch.empty((), device=meta)
    for step in range(2):
        is_bad, median = bad_steps.judge(number, number)
        bad_steps.remember(number)
        ballot = torch.empty(3, device=meta)
        reports.tell(step, 8, ballot, number, is_bad, median, number)
    with pytest.raises((RuntimeError, NotImplementedError)):
        reports.next(is_awaited=False)  # the first of two: there it is read


def told(reports: Reports, step: int, is_left_out: bool = False, scale: float = 0.0) -> None:
    reports.tell(
        step,
        8 * step,
        torch.tensor([2.5, 0.0, 1.0]),
        torch.tensor(math.inf if is_left_out else 0.5),
        torch.tensor(float(is_left_out)),
        torch.tensor(math.nan),
        torch.tensor(scale) if scale else 1.0,
    )


def test_a_report_is_read_as_late_as_the_lag_unless_it_is_awaited(monkeypatch):
    for lag in (0, 1, 2):
        monkeypatch.setattr("training.step_reports.LAG", {"cpu": lag})
        reports = Reports(CPU)
        for step in range(1, 6):
            told(reports, step)
            report = reports.next(is_awaited=False)
            assert (report and report.iteration) == (step - lag if step > lag else None)
            assert reports.next(is_awaited=False) is None
        rest = [reports.next(is_awaited=True) for _ in range(lag)]
        assert [report and report.iteration for report in rest] == list(range(6 - lag, 6))
        assert reports.next(is_awaited=True) is None


def test_a_report_holds_what_was_told_even_if_the_tensors_have_changed_since():
    reports, scale = Reports(CPU), torch.tensor(1024.0)
    ballot = torch.tensor([2.5, 0.0, 1.0])
    zero = torch.tensor(0.0)
    reports.tell(3, 24, ballot, torch.tensor(0.5), zero, torch.tensor(0.25), scale)
    for tensor in (ballot, scale):
        tensor.fill_(7.0)
    assert reports.next(is_awaited=False) == Report(3, 24, 2.5, (0.0, 1.0), 0.5, False, 0.25, 1024)
    told(reports, 4)
    report = reports.next(is_awaited=False)
    assert report is not None
    assert report.grad_scale is None
    told(reports, 5)
    reports.forget()
    assert reports.next(is_awaited=True) is None


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "text", "is_search"),
    [
        (2.0, math.inf, None, "the gradient is not finite", False),
        (2.0, math.nan, 2.0, "the gradient is not finite at a loss scale of 2", True),
        (2.0, math.inf, 1.0, "the gradient is not finite at a loss scale of 1", False),
        (math.nan, math.nan, 1024.0, "the loss is nan", False),
        (2.0, 30.0, 1024.0, "the gradient norm 30 is a spike, their median is 1.25", False),
    ],
)
def test_a_step_that_is_left_out_has_its_reason(loss, norm, scale, text, is_search):
    report = Report(7, 56, loss, (), norm, True, 1.25, scale)
    assert complaint(report) == text
    assert is_search_for_a_scale(report) == is_search
    assert complaint(Report(7, 56, 2.0, (), 1.0, False, 1.25, scale)) is None
