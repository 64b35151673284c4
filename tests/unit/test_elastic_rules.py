"""On how many processes, and with which division of the step, a run may go on."""

import pytest

from kit.core.config import elastic_rules
from kit.core.config.elastic_rules import describe, faults, split_fault
from kit.core.config.run_checks import check_run_directory
from tests.unit.test_checks import configuration, directory_refusal, run_with_checkpoint


def divided(size: int, steps: int, **changes):
    return configuration(train__per_device_train_batch_size=size, train__gradient_accumulation_steps=steps, **changes)


@pytest.mark.parametrize(
    ("now", "processes"), [((16, 1), 2), ((8, 2), 2), ((32, 1), 1), ((8, 4), 1), ((8, 1), 4), ((2, 4), 4)]
)
def test_a_step_of_as_many_completions_goes_on_with_any_number_of_processes(now, processes):
    assert faults(divided(16, 1), divided(*now), 2, processes) == []


@pytest.mark.parametrize(
    ("now", "processes", "fix"),
    [
        ((16, 1), 1, "(16 per device x 1 processes x 1 steps): set train.gradient_accumulation_steps to 2"),
        ((16, 1), 4, "(16 per device x 4 processes x 1 steps): set train.per_device_train_batch_size to 8"),
        ((12, 3), 4, "set train.per_device_train_batch_size to 8 and train.gradient_accumulation_steps to 1"),
        ((16, 1), 3, "3 processes do not divide it. Use 1, 2, 4, 8, 16, 32"),
    ],
)
def test_another_step_is_refused_with_the_values_that_make_it_the_run_s(now, processes, fix):
    (fault,) = faults(divided(16, 1), divided(*now), 2, processes)
    assert fault.startswith("a step had 32 completions (16 per device x 2 processes x 1 steps) and would have ")
    assert fault.endswith(fix)


def test_what_is_computed_over_an_accumulation_step_needs_the_same_one():
    trl = {"train__trl": "{top_entropy_quantile: 0.5}"}
    (fault,) = faults(divided(16, 1, **trl), divided(16, 2, **trl), 2, 1)
    assert "train.trl.top_entropy_quantile is computed over the completions of an accumulation step, which" in fault
    assert "were 32 and would be 16: keep train.gradient_accumulation_steps at 1" in fault
    assert faults(divided(16, 1, **trl), divided(32, 1, **trl), 2, 1) == []
    assert faults(divided(16, 1), divided(16, 2), 2, 1) == []


def test_a_split_optimizer_needs_its_processes_and_a_whole_one_none_that_split_it():
    assert split_fault(True, None, 2, 1) is None and split_fault(False, "FSDP2", 2, 2) is None
    assert "in 2 parts, as FSDP2 splits it, and 4 processes would read it: resume with 2" in split_fault(
        False, "FSDP2", 2, 4
    )
    assert "has a part of the optimizer's state per process" in split_fault(False, None, 2, 2)
    assert "DeepSpeed reads a part per process" in split_fault(True, "DeepSpeed", 2, 2)


def test_what_differs_is_described():
    assert describe(configuration(), 2, 2) == ""
    told = describe(configuration(), 2, 1)
    assert told.startswith("processes 2 -> 1: the same problems in the same order") and "completions are drawn" in told
    assert "drawn" not in describe(configuration(rollout__backend="server"), 2, 1)
    dropped = describe(configuration(rollout__backend="server", policy__lora_dropout=0.1), 2, 1)
    assert dropped.endswith("; dropout masks are drawn from other random numbers")


def test_a_directory_is_resumed_by_what_its_checkpoint_says_of_its_processes(tmp_path, monkeypatch):
    run_with_checkpoint(tmp_path / "run", divided(16, 1), processes=2)
    place = {"run__output_dir": tmp_path / "run"}  # its config.json says one process
    check_run_directory(divided(8, 2, **place), resume=True, processes=1)
    message = "a step had 16 completions (16 per device x 1 processes x 1 steps) and would have 32"
    assert message in directory_refusal(divided(16, 1, **place), resume=True, processes=2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found = directory_refusal(divided(16, 1, **place), resume=True)
    assert "its checkpoint has the optimizer's state in one file, FSDP2 reads a part per process" in found
    (tmp_path / "run/checkpoints/step-000002/optimizer.pt").rename(tmp_path / "run/checkpoints/step-000002/optimizer")
    monkeypatch.undo()
    assert "no whole training-state" in directory_refusal(divided(16, 1, **place), resume=True)


def test_only_the_division_of_the_step_is_free():
    assert elastic_rules.DIVISION == ("train.per_device_train_batch_size", "train.gradient_accumulation_steps")
