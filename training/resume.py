"""What may go on from what: a run from a checkpoint, and a new run from another one's weights.

A checkpoint fits a run in three ways that the shapes of its weights do not show: its tokenizer's
ids, how its weights are read, and which text the steps to come would have trained on. Each of these
that differs is refused by name, since the run would go on without complaint and be another one.
Whoever means it says so with --allow_changed. All else may change, and is told: what it does to
the learning rate is told in figures.

These are functions of dicts alone, of the checkpoint and of the flat configuration; whether the
weights have the right shapes is checkpoint.py's to say.
"""

from collections.abc import Collection, Mapping
from typing import Any

from data.tokenizer import fingerprint
from optim.schedule import learning_rate
from training.checkpoint_file import CheckpointError
from training.config import OF_ONE_START, default_options

# Options that the shapes of weights need not show, and that change what the weights mean.
READING = ("num_heads", "num_kv_heads", "qk_norm", "tie_weights", "rope_theta", "norm_eps")
# Options that fix which text a step trains on.
DATA_ORDER = ("seed", "batch_size", "max_seq_len", "epochs")
# What --allow_changed can name.
ALLOWABLE = (*DATA_ORDER, *READING, "tokenizer", "data")
REASONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (DATA_ORDER, "this would change which text each step trains on"),
    (READING, "these weights are another model's"),
    (("tokenizer",), "the data folder was prepared with another tokenizer than the checkpoint's"),
    (("data",), "these are not the token files that the checkpoint was trained on"),
)
# Not worth a line on resume: how the run was started, and when its files are written.
UNSAID = (*OF_ONE_START, "async_checkpoint")

# What the learning rate of a step depends on, of any schedule and of each.
SCHEDULE = {
    "cosine": ("schedule", "warmup_iters", "cos_cycle_iters", "lr_min", "lr_max"),
    "constant": ("schedule", "warmup_iters", "lr_max"),
    "wsd": ("schedule", "warmup_iters", "decay_iters", "iterations", "lr_min", "lr_max"),
}
ALL_OF_SCHEDULE = tuple(dict.fromkeys(name for names in SCHEDULE.values() for name in names))
# Two curves are compared at about this many steps, as a run of millions must not wait for its
# resume, and at every bend. Between bends each is a line or a part of a cosine: no two that differ
# meet at all of these.
STEPS_COMPARED = 1000


def check(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    tokenizer_json: str,
    data_fingerprint: str,
    allowed: Collection[str] = (),
) -> None:
    """Refuse to go on where the run would not be the checkpoint's any more.

    Args:
        saved: the checkpoint; one of before there were data fingerprints is believed in that.
        config: all options of the run, flat, nothing left to be filled in.
        tokenizer_json: of the run's data.
        data_fingerprint: of the run's data.
        allowed: names of ALLOWABLE that may differ.

    Raises:
        CheckpointError: one line that names each difference with both values, and what permits it;
            another optimizer is never permitted.
    """
    different = _differences(saved, config, tokenizer_json, data_fingerprint)
    if "optimizer" in different:
        before, now = different["optimizer"]
        raise CheckpointError(
            f"optimizer {before} -> {now}: the state that the checkpoint holds serves no other; "
            "start a new run from its weights with --init_from"
        )
    refused = [name for name in ALLOWABLE if name in different and name not in allowed]
    if "epochs" in refused and None not in different["epochs"]:
        refused.remove("epochs")  # more or fewer of them are the same order, for longer or shorter
    if refused:
        raise CheckpointError(
            f"this run cannot go on from the checkpoint: {_said(refused, different)}; resume with "
            "the checkpoint's own values and data, or permit the change with "
            f"--allow_changed {' '.join(refused)}"
        )


def check_init(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    tokenizer_json: str,
    allowed: Collection[str] = (),
) -> None:
    """Refuse to start a new run from weights that it would read in another way.

    Only the architecture and the tokenizer count: data, seed and batch are the new run's own.

    Raises:
        CheckpointError: one line that names each difference with both values, and what permits it.
    """
    different = _differences(saved, config, tokenizer_json, None)
    counting = (*READING, "tokenizer")
    refused = [name for name in counting if name in different and name not in allowed]
    if refused:
        raise CheckpointError(
            f"init_from has weights that do not fit this run: {_said(refused, different)}; start "
            "with the checkpoint's own values and tokenizer, or permit the change with "
            f"--allow_changed {' '.join(refused)}"
        )


def changes(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    tokenizer_json: str | None = None,
    data_fingerprint: str | None = None,
) -> list[str]:
    """Say what differs from the checkpoint, permitted or harmless, as `name: old -> new`.

    An option that the checkpoint is too old to know had its default there.

    Args:
        saved: the checkpoint.
        config: all options of the run, flat.
        tokenizer_json: of the run's data; None: not to be compared.
        data_fingerprint: of the run's data; None: not to be compared.
    """
    different = _differences(saved, config, tokenizer_json, data_fingerprint)
    return [
        f"{name}: {before} -> {now}"
        for name, (before, now) in different.items()
        if name not in UNSAID
    ]


def is_measured_anew(
    saved: Mapping[str, Any], config: Mapping[str, Any], data_fingerprint: str
) -> bool:
    """Whether a validation loss of before cannot be compared with those to come.

    Args:
        saved: the checkpoint.
        config: all options of the run, flat.
        data_fingerprint: of the run's data.
    """
    different = _differences(saved, config, None, data_fingerprint)
    return not different.keys().isdisjoint(("val_windows", "seed", "max_seq_len", "data"))


def schedule_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], iteration: int
) -> list[str]:
    """Say in figures where the steps to come have another learning rate than they would have had.

    The rule is that the learning rate is a function of the step and of the present options alone,
    whatever they were before. A longer run so has a longer cosine, and its rate can rise at the
    place where it goes on.

    Args:
        before: the checkpoint's configuration, flat and filled in.
        now: the run's, likewise.
        iteration: steps that are done.

    Returns:
        Lines; none where every remaining step has the rate that it would have had.
    """
    if any(before.get(name) is None for name in ALL_OF_SCHEDULE):
        return []
    step = _first_difference(before, now, iteration + 1)
    if step is None:
        return []
    then, here = _apart(_rate(before, step), _rate(now, step))
    last = now["iterations"]
    line = (
        f"the schedule has changed: the learning rate of step {step} would have been {then} and is "
        f"{here}; it follows from the present options alone, and ends at {_rate(now, last):.2e} "
        f"in step {last}"
    )
    options = [name for name in SCHEDULE[before["schedule"]] if before[name] != now[name]]
    if "iterations" not in options:  # nobody wants the old length back who has just changed it
        kept = " ".join(f"--{name} {before[name]}" for name in options)
        line += f" ({kept} keeps the old curve)"
    lines = [line]
    previous, following = _rate(before, iteration), _rate(now, iteration + 1)
    if before["warmup_iters"] <= iteration and previous < following:
        left, right = _apart(previous, following)
        lines.append(
            f"the learning rate rises, from {left} in step {iteration} to {right} in step "
            f"{iteration + 1}"
        )
    return lines


def samples_done(saved: Mapping[str, Any], max_seq_len: int) -> int:
    """How many samples are trained on or passed over; the next one has this number.

    Checkpoints of before the samples were counted had one batch size from their first step on.

    Args:
        saved: the checkpoint.
        max_seq_len: of the run. If its windows have another length than the checkpoint's, as many
            tokens are done, and so another number of windows.
    """
    before = saved["config"]
    samples: int = saved.get("samples", saved["iteration"] * before["batch_size"])
    return -(-samples * before["max_seq_len"] // max_seq_len)


def _differences(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer_json: str | None,
    data_fingerprint: str | None,
) -> dict[str, tuple[Any, Any]]:
    """All that is another now, by name, with both values."""
    before, defaults = saved["config"], default_options()
    pairs = {}
    for name, value in config.items():
        # What the checkpoint is too old to know had its default, unless that is for the model or
        # the data to fill in: there the checkpoint is believed to agree.
        default = value if name in ALLOWABLE else defaults.get(name)
        pairs[name] = (before.get(name, default), value)
    theirs = saved.get("tokenizer")
    # As texts first: nearly always they are equal, and to hash a large vocabulary takes a moment.
    if theirs is not None and tokenizer_json is not None and theirs != tokenizer_json:
        pairs["tokenizer"] = (fingerprint(theirs)[:12], fingerprint(tokenizer_json)[:12])
    theirs = saved.get("data_fingerprint")
    if theirs is not None and data_fingerprint is not None:
        pairs["data"] = (theirs[:12], data_fingerprint[:12])
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _said(refused: list[str], different: Mapping[str, tuple[Any, Any]]) -> str:
    """The refused names with both values, each group with its reason."""
    parts = []
    for names, reason in REASONS:
        values = [
            f"{name} {different[name][0]} -> {different[name][1]}"
            for name in names
            if name in refused
        ]
        if values:
            parts.append(f"{', '.join(values)}: {reason}")
    return "; ".join(parts)


def _rate(config: Mapping[str, Any], step: int) -> float:
    return learning_rate(step, **{name: config[name] for name in ALL_OF_SCHEDULE})


def _first_difference(before: Mapping[str, Any], now: Mapping[str, Any], first: int) -> int | None:
    """The first of the compared remaining steps whose learning rate is another one."""
    steps = _steps_to_compare((before, now), first, now["iterations"])
    return next((step for step in steps if _rate(before, step) != _rate(now, step)), None)


def _steps_to_compare(configs: tuple[Mapping[str, Any], ...], first: int, last: int) -> list[int]:
    """Steps from first to last in order: evenly spread ones, the ends, and where a curve bends."""
    steps = {*range(first, last + 1, max(1, (last - first) // STEPS_COMPARED)), last}
    for config in configs:
        begin_of_decay = config["iterations"] - config["decay_iters"]
        bends = (
            config["warmup_iters"],
            config["cos_cycle_iters"],
            begin_of_decay,
            config["iterations"],
        )
        steps.update(bend + beside for bend in bends for beside in (-1, 0, 1))
    return sorted(step for step in steps if first <= step <= last)


def _apart(one: float, other: float) -> tuple[str, str]:
    """Both with as many digits as show that they differ."""
    digits = next((n for n in range(2, 16) if f"{one:.{n}e}" != f"{other:.{n}e}"), 16)
    return f"{one:.{digits}e}", f"{other:.{digits}e}"
