"""A dry run says what a run would take and all that would stop it, and leaves no trace."""

import re
import sys
from pathlib import Path

import pytest

import train_ddp
from prepare import PrepareConfig
from tests.resuming import prepared
from tests.tiny import TINY, flags
from training.command_line import CommandLineError
from training.config import load_config
from training.config_checks import check
from training.dry_run import ASSUMED_VOCAB_SIZE
from training.metrics import batch_line

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMALL = {**TINY, "batch_size": 8, "iterations": 100}


@pytest.fixture
def said(capsys, monkeypatch, tmp_path):
    """What `train_ddp.py --dry_run` with these options says, in an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, **options) -> str:
        monkeypatch.setattr(sys, "argv", ["train_ddp.py", *argv, *flags(**options), "--dry_run"])
        train_ddp.main()
        return capsys.readouterr().out

    return run


def problems(said, *argv: str, **options) -> list[str]:
    with pytest.raises(CommandLineError) as caught:
        said(*argv, **options)
    return str(caught.value).split("; ")


def gigabytes(text: str, what: str) -> float:
    found = re.search(rf"^ +([\d.]+)  {re.escape(what)}", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_it_says_what_the_run_computes_and_holds_and_how_long_it_takes(said):
    text = said(
        preset="gpt2-124m", num_layers=2, vocab_size=32768, batch_size=64, iterations=1000,
        gradient_accumulation_steps=2, world_size=8, device_name="h200", assumed_mfu=0.5,
    )  # fmt: skip
    matrices = 2 * (4 * 768 * 768 + 3 * 768 * 2048)
    gains = 768 + 2 * (2 * 768 + 2 * 64)
    tied = 32768 * 768
    assert f"model: {matrices + gains + tied:,} parameters: {matrices:,} in the blocks'" in text
    assert f"{tied:,} in embedding and head, {gains:,} in gains" in text
    assert "4 sequences x 2 micro-batches x 8 processes x 1024 tokens = 65,536 tokens a" in text
    assert "length: 1,000 steps, 65,536,000 tokens" in text
    flops = 65_536_000 * 6 * (matrices + tied + 2 * 768 * 1025)
    assert f"compute: {flops:.3g} FLOP" in text
    seconds = round(flops / (8 * 989e12 * 0.5))
    assert f"{seconds // 60}:{seconds % 60:02d} at 50% of the peak of 8 x NVIDIA H200" in text
    weights = gigabytes(text, "weights") * 2**30
    assert weights == pytest.approx(4 * (matrices + gains + tied), rel=0.02)
    moments = gigabytes(text, "optimizer state")
    assert moments * 2**30 == pytest.approx(2 * weights / 8, rel=0.02)
    without = gigabytes(text, "at most in forward and backward")
    assert gigabytes(text, "at most with --activation_checkpointing true") < without


def test_nothing_is_written_and_data_is_not_prepared(said, tmp_path):
    text = said()
    assert list(tmp_path.iterdir()) == []
    assert f"vocab_size {ASSUMED_VOCAB_SIZE:,} is assumed" in text
    assert PrepareConfig().vocab_size == ASSUMED_VOCAB_SIZE


def test_with_the_data_at_hand_it_counts_in_epochs_and_knows_the_vocabulary(said, tmp_path):
    data_dir = prepared(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    text = said(**SMALL, data_dir=data_dir, world_size=4)
    assert "vocabulary 400 in 448 rows" in text
    (tokens,) = re.findall(r"([\d,]+) tokens for training", text)
    epochs = 51_200 / int(tokens.replace(",", ""))
    assert re.search(rf"100 steps, 51,200 tokens, [\d.]+ a parameter, {epochs:.2f} epochs", text)
    assert "2.00 epochs" in said(**SMALL, data_dir=data_dir, epochs=2)
    assert sorted(tmp_path.rglob("*")) == before
    too_long = problems(said, **{**SMALL, "max_seq_len": 1_000_000}, data_dir=data_dir)
    assert "one window needs 1000001" in too_long[0]


def test_the_length_of_epochs_of_an_unknown_text_is_not_guessed(said):
    small = {name: value for name, value in SMALL.items() if name != "lr_max"}
    for options in (SMALL, small):
        text = said(**options, epochs=3)
        assert "3 epochs of a text that is not here" in text
        assert "FLOP," not in text


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"device": "cpu"}, "as the peak of a CPU in float32 is not: give --peak_tflops"),
        ({"device": "auto", "device_name": "NVIDIA X1"}, "as the peak of NVIDIA X1 in float32"),
        ({"device": "auto", "device_name": "NVIDIA H200"}, "peak of NVIDIA H200 in float32 is not"),
        ({"device": "cpu", "peak_tflops": 0.1}, "of 1 x a CPU, 0.1 TFLOP/s in float32"),
    ],
)
def test_a_time_without_a_known_peak_needs_a_stated_one(said, options, answer):
    assert answer in said(**{**SMALL, **options})


def test_every_problem_is_told_at_once_with_what_would_work(said, tmp_path):
    out_dir = tmp_path / "a_file"
    out_dir.write_text("")
    found = problems(
        said, batch_size=30, gradient_accumulation_steps=2, world_size=4, beta2=1, num_heads=3,
        iterations=9, warmup_iters=5, cos_cycle_iters=2, out_dir=out_dir, device_name="H100",
        init_from="none.pt", assumed_mfu=40, timeout_seconds=0,
    )  # fmt: skip
    expected = [
        "batch_size 30 does not divide by 4 processes x 2 accumulation steps: use 24 or 32",
        "beta2 is 1.0",
        "assumed_mfu is 40.0",
        "device_name H100 may be NVIDIA H100 80GB HBM3 or NVIDIA H100 NVL or NVIDIA H100 PCIe",
        "d_model 256 does not divide by num_heads 3: use num_heads 2 or 4",
        "none.pt does not exist",
        "timeout_seconds is 0.0",
    ]
    for part in expected:
        assert any(part in problem for problem in found), (part, found)
    assert "a_file is no folder" in problems(said, out_dir=out_dir / "a" / "b")[0]
    both = problems(said, num_heads=3, iterations=9, warmup_iters=5, cos_cycle_iters=2)
    assert len(both) == 2
    assert "cannot use out_dir xxx" in problems(said, out_dir="x" * 300)[0]
    assert "a_file" in problems(said, data_dir=out_dir)[0]
    assert len(problems(said, resume="")) == len(problems(said, init_from="")) == 1
    assert "xxx: File name too long" in problems(said, data_dir="x" * 300)[0]
    assert "epochs is inf" in problems(said, epochs="1e400")[0]
    assert "muon_lr is inf" in problems(said, muon_lr="1e400")[0]
    assert "nccl needs GPUs" in problems(said, backend="nccl", device="cpu")[0]
    assert (
        "cos_cycle_iters 2 ends within"
        in problems(said, iterations=9, warmup_iters=5, cos_cycle_iters=2)[0]
    )


def test_a_folder_that_holds_a_run_is_told_unless_the_run_goes_on(said, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "ckpt_00000050.pt").write_text("not read")
    out_dir = tmp_path / "run"
    assert "holds a run of 50 steps" in problems(said, **SMALL, out_dir=out_dir)[0]
    for going_on in ({"resume": "auto"}, {"overwrite": "true"}):
        assert "tokens a step" in said(**SMALL, out_dir=out_dir, **going_on)
    assert (checkpoints / "ckpt_00000050.pt").read_text() == "not read"


def test_the_world_is_that_of_the_environment_and_one_rank_speaks(said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert "x 4 processes" in said(**SMALL)
    monkeypatch.setenv("RANK", "1")
    assert said(**SMALL) == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "several")
    assert "WORLD_SIZE is 'several'" in problems(said, **SMALL)[0]


def test_a_real_run_does_not_pass_over_options_of_a_dry_one():
    for argv in (["--world_size", "2"], ["--device_name", "h200"], ["--assumed_mfu", "0.3"]):
        with pytest.raises(CommandLineError, match=f"{argv[0][2:]} is for --dry_run alone"):
            check(load_config("A test.", argv), 1)


def test_the_tokens_of_a_step_are_the_same_for_any_number_of_processes():
    lines = []
    for world_size in (1, 2, 3, 4):
        config = load_config("A test.", ["--batch_size", "24", "--max_seq_len", "64"])
        check(config, world_size)
        lines.append(batch_line(config, world_size))
    assert {line.split(" = ")[1] for line in lines} == {"1,536 tokens a step"}
    for line in lines:  # how they are shared out gives the same
        factors = [int(number) for number in re.findall(r"\d+", line.split(" = ")[0])]
        assert factors[0] * factors[1] * factors[2] * factors[3] == 1536


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_ready_configuration_could_start_as_its_comment_says(said, path):
    """The dry run that the file gives; with fewer layers and rows, which says as much, sooner."""
    text = path.read_text().replace("\\\n#", "")
    command = re.search(r"python train_ddp\.py (.*--dry_run[^#\n]*)", text)
    assert command is not None
    argv = [str(path) if part.startswith("configs/") else part for part in command[1].split()]
    argv.remove("--dry_run")
    config = load_config("A test.", argv)
    assert (config.planned.world_size or 1) == processes(text)
    assert "tokens a step" in said(*argv, "--num_layers", "2")


def processes(text: str) -> int:
    """On how many a configuration's comment starts it."""
    each = re.search(r"--nproc_per_node=(\d+)", text) or re.search(r"--gpus-per-node=(\d+)", text)
    nodes = re.search(r"--nodes=(\d+)", text)
    return (int(each[1]) if each else 1) * (int(nodes[1]) if nodes else 1)
