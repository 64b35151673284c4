"""A run goes on over the base that it was started on, and over no other; nothing is written when it is another."""

import contextlib
from types import SimpleNamespace

import pytest

from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import BASE
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_json
from kit.policy import load as policy
from kit.policy.load import check_base_unchanged, record_base
from kit.train import setup
from tests.conftest import CONFIG
from tests.unit.filled import filled

HASH = "0123456789abcdef" * 4


def facts(content: str = HASH) -> dict:
    return filled(BASE, {"hash": content, "tensors": {"a": content[:8], "b": "b"}, "revision": "main"})


@pytest.fixture
def base(monkeypatch):
    """`base(hash)`: what the base in memory is found to be."""

    def hold(content: str) -> None:
        monkeypatch.setattr(policy, "hash_base", lambda model: facts(content))

    hold(HASH)
    return hold


# The start, the middle and the end: messages show the first twelve digits.
OTHERS = ["f" * 64, HASH[:-1] + "0", HASH[:12] + "0" * 52, ""]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("write", [True, False])
def test_a_resume_on_another_base_is_refused_and_the_record_stays(tmp_path, base, other, write):
    run, config = RunDir(tmp_path), load_config(CONFIG)
    record_base(None, run, config)
    before = run.base_file.read_bytes()
    assert record_base(None, run, config, write)["hash"] == HASH and run.base_file.read_bytes() == before
    base(other)
    with pytest.raises(BadInput, match=r"another base"):
        record_base(None, run, config, write)
    assert run.base_file.read_bytes() == before


@pytest.mark.parametrize("other", OTHERS)
def test_the_trainer_is_not_given_another_base_than_the_runs(tmp_path, base, monkeypatch, other):
    run, config = RunDir(tmp_path), load_config(CONFIG)
    closed = SimpleNamespace(check_base=lambda content: None)
    monkeypatch.setattr(setup, "make_rollout", lambda *_: closed)
    monkeypatch.setattr(policy, "load_policy_base", lambda config, shared: "the model")
    monkeypatch.setattr("kit.policy.sharding.loading_whole", lambda arguments: contextlib.nullcontext())
    model, found, _ = setup.load_base(config, run, None, None, None)
    assert model == "the model" and found["hash"] == read_json(run.base_file)["hash"] == HASH
    base(other)
    with pytest.raises(BadInput, match="another base"):
        setup.load_base(config, run, None, None, None)
    assert read_json(run.base_file)["hash"] == HASH


def test_a_base_that_the_servers_do_not_hold_is_not_recorded(tmp_path, base, monkeypatch):
    def refuse(content: str) -> None:
        assert content == HASH
        raise BadInput("the server holds another base")

    monkeypatch.setattr(setup, "make_rollout", lambda *_: SimpleNamespace(check_base=refuse))
    monkeypatch.setattr(policy, "load_policy_base", lambda config, shared: "the model")
    monkeypatch.setattr("kit.policy.sharding.loading_whole", lambda arguments: contextlib.nullcontext())
    run = RunDir(tmp_path)
    with pytest.raises(BadInput, match="the server holds another base"):
        setup.load_base(load_config(CONFIG), run, None, None, None)
    assert not run.base_file.exists()


@pytest.mark.parametrize("other", OTHERS)
def test_a_base_that_changed_in_training_is_found_and_its_tensors_named(tmp_path, base, other):
    check_base_unchanged(None, facts())
    base(other)
    with pytest.raises(CheckFailed, match=r"1 of 2 tensors.*\['a'\]" if other[:8] != HASH[:8] else "changed"):
        check_base_unchanged(None, facts())


def test_what_is_recorded_names_the_model_and_its_revision(tmp_path, base):
    run = RunDir(tmp_path)
    found = record_base(None, run, load_config(CONFIG, [f"--model.path={tmp_path}"]))
    assert found == read_json(run.base_file) and found["model"] == str(tmp_path.resolve())
    write_json(run.base_file, found)
    hub = load_config(CONFIG, ["--model.path=null", "--model.id=org/name", "--model.revision=abc"])
    again = record_base(None, run, hub, write=False)
    assert (again["model"], again["revision"]) == ("org/name", "abc")
