"""A hundred steps through `launch.up` with a fault every ten, as bench/soak.py has them for 2,000: the run is the one
that had none, bit for bit."""

from pathlib import Path

import pytest

from bench.soak import Ran, Soak, differences
from bench.soak_faults import Fault, planned
from bench.soak_replica import NumpyReplica
from kit.core.run_directory import RunDir
from tests.conftest import CONFIG

pytestmark = pytest.mark.slow
STEPS, EVERY = 100, 10
# Those that are over in seconds: a process that is stopped is noticed after launch.stall_s.
KINDS = (
    *("kill trainer", "kill replica", "clock +1 h", "clock -1 h"),
    *(f"network {kind}" for kind in ("error", "short", "few", "version", "cut", "lost")),
)


@pytest.fixture(scope="module")
def soak(tmp_path_factory, learning_model_dir) -> Soak:
    from merge.export import main as merge_base

    made = Soak(tmp_path_factory.mktemp("soak"), steps=STEPS)
    made.model = learning_model_dir
    line = ["--config", str(CONFIG), "--model.path", str(made.model), "--out", str(made.folder / "base")]
    assert merge_base(line) == 0
    return made


@pytest.fixture(scope="module")
def calm(soak, recipe) -> Ran:
    """In this process, with a replica of its own on the same port."""
    run = RunDir(soak.folder / "calm" / "run")
    replica = NumpyReplica(soak.folder / "base", soak.port)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SOAK_FOLDER", str(soak.folder))
            done = recipe(soak.arguments(run))
    finally:
        replica.stop()
    assert done.code == 0, done.err
    return Ran(run, 0.0, [], [], 1, [])


@pytest.fixture(scope="module")
def faulty(soak) -> Ran:
    return soak.run("faulty", planned(STEPS, EVERY, seed=0, kinds=KINDS))


def fault(ran: Ran, kind: str) -> Fault:
    (found,) = [one for one in ran.faults if one.kind == kind]
    return found


def test_a_run_with_ten_faults_is_the_run_without(calm, faulty):
    assert differences(calm, faulty, STEPS, is_exact=True) == []
    rewards = [row["reward"] for row in calm.rows]
    assert sum(rewards[-20:]) > sum(rewards[:20]), "and it learns"


def test_each_fault_had_its_effect_and_a_step_followed(faulty):
    assert [one.kind for one in faulty.faults if one.effect is None or not one.seconds] == []
    assert fault(faulty, "kill trainer").new == {"replica": 0, "trainer": 1}
    assert fault(faulty, "kill replica").new == {"replica": 1, "trainer": 0}
    for kind in ("network version", "network few"):
        assert fault(faulty, kind).new == {"replica": 1, "trainer": 0}
    for kind in ("clock +1 h", "clock -1 h"):
        assert not any(fault(faulty, kind).new.values())
    assert faulty.ups == 1 and not any(one.ups for one in faulty.faults), "launch.up goes on by itself"


def test_nothing_piles_up_in_the_run_directory(faulty):
    run: Path = faulty.run.path
    assert len(list(faulty.run.checkpoints.iterdir())) == 2 and len(list((run / "sync").glob("*/v*"))) <= 1
    assert not list(run.rglob(".partial-*")) and not list(run.rglob("*.tmp"))
