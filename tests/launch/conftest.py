"""The machines that the launchers are tried on."""

import shutil

import pytest

from tests.launch.stand_ins import ROOT, Machine


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def machine_with_gpus(machine):
    machine.add(
        "nvidia-smi",
        """printf 'GPU %s: NVIDIA H200 (UUID: GPU-x)\\n' 0 1 2 3
printf '  MIG 1g.18gb     Device  0: (UUID: MIG-x)\\n'""",
    )
    return machine


@pytest.fixture
def cluster(machine):
    """A Slurm node of 8 CPUs; srun starts what it is told, once, here."""
    repository = machine.folder / "repository"
    repository.mkdir()
    (repository / "train_ddp.py").touch()
    (repository / "launch").symlink_to(ROOT / "launch")
    machine.environment = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_SUBMIT_DIR": str(repository),
        "SLURM_CPUS_ON_NODE": "8",
        "MARKER": str(repository / "runs" / "a" / "status"),
    }
    machine.add("srun", 'exec "$@"')
    machine.add("scontrol", "printf '%s\\n' n1 n2")
    machine.add("python3", f'{shutil.which("rm")} -f "$MARKER"; echo "$MARKER"')
    machine.remove("nproc")
    return machine
