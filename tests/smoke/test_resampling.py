"""Dynamic sampling and replay by the recipe's command line: what is replaced; resumed runs repeat the uninterrupted
one."""

import contextlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit.core.run_directory import RunDir
from kit.rollout.protocol import decode_ids, encode_floats, encode_ids
from kit.train.loss import LossInputs, compute_loss
from kit.train.mismatch import measure
from tests import processes
from tests.smoke.test_two_processes import fake_replica, server_keys
from tests.unit.episode_cases import HERE

# Eight groups of two: with a third of the answers right, every other group has equal rewards.
KEYS = {"rollout.group_size": 2, "rollout.resample_rounds": 1, "rollout.resample_budget": 6}
KEYS |= {"rollout.replay_steps": 4}
KEYS |= {"watch.completions_every": 1}
PACKED = {"train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2}
PACKED |= {"train.micro_batch_tokens": 128, "train.num_iterations": 2, "train.mask_truncated": True}
# All of a step's line that does not depend on the clock or on memory.
CLOCK = {"time", "seconds", "resample_seconds", "peak_gib", "rollout_tokens_per_s", "update_tokens_per_s"}


def by_length(completions: list, **columns: Any) -> list[float]:
    """A reward that differs where completions have different lengths."""
    return [float(len(one[0]["content"])) for one in completions]


@contextlib.contextmanager
def watching(seen: list[LossInputs]) -> Iterator[None]:
    """Adds the loss's inputs of each micro-batch to `seen`."""

    def watched(inputs: LossInputs, *more: Any) -> Any:
        seen.append(replace(inputs, logps=inputs.logps.detach(), entropies=None))
        return compute_loss(inputs, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kit.train.step.compute_loss", watched)
        yield


@pytest.fixture(scope="module", params=["plain", "packed"])
def whole(request, tmp_path_factory, recipe, recipe_arguments, learning_model_dir):
    """(an uninterrupted run of six steps, its keys, the loss's inputs of each micro-batch)."""
    keys, seen = KEYS | (PACKED if request.param == "packed" else {}), []
    run = RunDir(tmp_path_factory.mktemp("resampled") / "run")

    with watching(seen):
        done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 0, f"{done.out}\n{done.err}"
    return run, keys, seen


def assert_equal_runs(found: RunDir, wanted: RunDir, read_jsonl: Any, but: set[str] | None = None) -> None:
    assert found.ledger_file.read_text() == wanted.ledger_file.read_text()
    for one, other in zip(*(read_jsonl(run.metrics_file) for run in (found, wanted)), strict=True):
        kept = one.keys() - CLOCK - (but or set())
        assert {key: one[key] for key in kept} == {key: other[key] for key in kept}
    mine, theirs = (load_file(run.newest_adapter() / "adapter_model.safetensors") for run in (found, wanted))
    assert mine.keys() == theirs.keys() and found.newest_adapter().name == wanted.newest_adapter().name
    for name, tensor in mine.items():
        assert tensor.equal(theirs[name]), name


def test_the_ledger_names_what_was_drawn_kept_and_dropped_and_the_metrics_count_it(whole, read_jsonl):
    run, keys, _ = whole
    entries, generating = read_jsonl(run.ledger_file), keys.get("train.num_iterations", 1)
    metrics = {row["step"]: row for row in read_jsonl(run.metrics_file)}
    replaced, replays = 0, 0
    for step in range(1, 7, generating):
        first, *others = (entry for entry in entries if entry["step"] == step)
        replay = others.pop() if "replayed" in others[-1] else {"replayed": [], "replaces": []}
        *rounds, outcome = others
        drawn = [name for entry in (first, *rounds) for name in entry["problem_ids"]]
        assert len(drawn) == len(set(drawn)) and len(rounds) <= 1 and len(first["problem_ids"]) == 8
        trained = outcome["kept"] + outcome["without_signal"]
        assert Counter(drawn) == Counter(trained + outcome["dropped"]) and len(trained) == 8
        rows = read_jsonl(run.completions / f"step-{step:06d}.jsonl")
        old = Counter(f"{one['problem_id']} {one['step'] - 1}" for one in replay["replayed"] * 2)
        left = Counter(trained) - Counter(replay["replaces"])
        assert {*replay["replaces"]} <= {*outcome["without_signal"]}
        assert Counter(row["problem_id"] for row in rows if row["adapter_version"] == step - 1) == left + left
        assert Counter(f"{row['problem_id']} {row['adapter_version']}" for row in rows) - old == Counter(
            {f"{name} {step - 1}": 2 * count for name, count in left.items()}
        )
        rows = [row for row in rows if row["adapter_version"] == step - 1]
        teaching = {row["problem_id"] for row in rows if row["advantage"]}
        assert {*outcome["kept"]} <= teaching and ("train.mask_truncated" in keys or {*outcome["kept"]} == teaching)
        row, fresh = metrics[step], len(drawn) - 8
        assert (row["resample_rounds"], row["resampled_groups"]) == (len(rounds), fresh) and fresh * 2 <= 6
        assert row["replayed_groups"] == len(replay["replayed"]) and (row["replay_lag"] or 0) <= 4
        assert row["kept_fraction"] == pytest.approx(len(outcome["kept"]) / len(drawn))
        assert row["no_signal_fraction"] == pytest.approx(
            (len(outcome["without_signal"]) - len(replay["replayed"])) / 8
        )
        assert (row["dropped_tokens"] > 0) == bool(fresh) and 0 < row["resample_seconds"] < row["seconds"]["step"]
        # What is said of rewards is of the problems that the data's order drew, not of those that teach.
        if "train.mask_truncated" not in keys:
            assert row["zero_spread_fraction"] == pytest.approx(len(weak(rounds, outcome)) / 8)
        replaced, replays = replaced + fresh, replays + len(replay["replayed"])
    assert replaced > 3 and replays and (generating == 1 or metrics[2]["resample_rounds"] is None)


def weak(rounds: list[dict], outcome: dict) -> list[str]:
    """The problems without signal that the order of the run drew in a step."""
    return rounds[0]["replaces"] if rounds else outcome["without_signal"]


def test_a_replayed_row_has_the_log_probs_that_the_policy_gave_it_before_the_update_of_its_step(whole, read_jsonl):
    run, keys, seen = whole
    given, old = set(), Counter()
    for number, inputs in enumerate(seen):
        for mask, logps, before in zip(inputs.mask.bool(), inputs.logps, inputs.old_logps, strict=True):
            if mask.any() and not torch.equal(logps[mask], before[mask]):
                old[tuple(before[mask].tolist())] += 1
                assert tuple(before[mask].tolist()) in given, number
            given.add(tuple(logps[mask].tolist()))
    replayed = sum(row["replayed_groups"] or 0 for row in read_jsonl(run.metrics_file))
    if keys.get("train.num_iterations", 1) == 1:  # in a second update with a batch all rows differ
        assert sum(old.values()) == 2 * replayed and max(old.values()) == 1, "each once"


def test_a_resume_repeats_the_uninterrupted_run(
    whole, tmp_path, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    run, keys = RunDir(shutil.copytree(whole[0].path, tmp_path / "run")), whole[1]
    shutil.rmtree(run.checkpoints / "step-000006")
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys, ("--resume",)))
    assert done.code == 0 and "(step 4)" in done.out, f"{done.out}\n{done.err}"
    assert_equal_runs(run, whole[0], read_jsonl)
    (resume,) = read_jsonl(run.resumes_file)
    again = [entry for entry in read_jsonl(run.ledger_file) if entry["step"] > 4 and entry["problem_ids"]]
    assert resume["step"] == 4 and resume["sampled_again"] == [
        {"step": entry["step"], "problem_ids": entry["problem_ids"]} for entry in again
    ]


def test_a_run_killed_in_a_round_and_resumed_is_the_uninterrupted_one(
    whole, tmp_path, launch, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    run = RunDir(tmp_path / "run")
    arguments = recipe_arguments(learning_model_dir, run.path, whole[1])
    process = launch(arguments)
    steps = [entry["step"] for entry in read_jsonl(whole[0].ledger_file) if "round" in entry and entry["step"] > 2]
    place = f'{{"step": {steps[0]}, '

    def is_in_a_round() -> bool:
        lines = run.ledger_file.read_text().splitlines() if run.ledger_file.exists() else []
        return any(line.startswith(place) and '"round"' in line for line in lines)

    processes.wait_until(is_in_a_round, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    resumed = recipe([*arguments, "--resume"])
    assert resumed.code == 0 and "(step 2)" in resumed.out, f"{resumed.out}\n{resumed.err}"
    assert_equal_runs(run, whole[0], read_jsonl)


def test_two_processes_replace_groups_that_they_share_and_a_resume_repeats_them(
    tmp_path, recipe_arguments, learning_model_dir, read_jsonl
):
    """Three groups of four on two processes of six rows: the second group is on both."""
    keys = {
        "rollout.resample_rounds": 1,
        "rollout.replay_steps": 2,
        "train.per_device_train_batch_size": 6,
        "watch.completions_every": 1,
    }
    keys |= {"train.max_steps": 4, "train.save_steps": 2, "rollout.temperature": 0.3}
    run, again = RunDir(tmp_path / "run"), RunDir(tmp_path / "again")
    plan = [{"name": "run", "arguments": recipe_arguments(learning_model_dir, run.path, keys)}]
    plan.append({"name": "again", "arguments": recipe_arguments(learning_model_dir, again.path, keys, ("--resume",))})
    plan[1] |= {"copy": [str(run.path), str(again.path)], "remove": str(again.path / "checkpoints/step-000004")}
    more = {"recipe": "recipes.grpo_qlora", "environment": {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}}
    (tmp_path / "plan.json").write_text(json.dumps([one | more for one in plan]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = processes.run([*command, "tests/smoke/sharded_worker.py", str(tmp_path / "plan.json")], env=environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    entries = read_jsonl(run.ledger_file)
    assert sum("round" in entry for entry in entries) >= 2 and any("replayed" in entry for entry in entries)
    for step in range(1, 5):
        rows = read_jsonl(run.completions / f"step-{step:06d}.jsonl")
        outcome = next(entry for entry in entries if entry["step"] == step and "kept" in entry)
        groups = [rows[place : place + 4] for place in (0, 4, 8)]
        for group in groups:
            (name,) = {row["problem_id"] for row in group}
            rewards = {row["rewards"]["math"] for row in group}
            if group[0]["adapter_version"] < step - 1:
                assert len(rewards) > 1, "it was kept because it had signal"
            else:
                assert (len(rewards) > 1) == (name in outcome["kept"]) != (name in outcome["without_signal"])
            mean = sum(row["rewards"]["math"] for row in group) / 4
            for row in group:
                assert row["advantage"] == pytest.approx(row["rewards"]["math"] - mean, abs=1e-6)
    assert_equal_runs(again, run, read_jsonl)


def test_groups_are_replaced_by_those_that_servers_sample(
    tmp_path, recipe, recipe_arguments, tiny_model_dir, read_jsonl, request
):
    """The replica answers every other prompt with completions of one length, which gives no signal."""
    replica, asked = fake_replica(tiny_model_dir), []
    request.addfinalizer(replica.stop)

    def answer(body: dict) -> dict:
        ids = decode_ids(body["token_ids"])
        asked.append(has_signal := sum(ids) % 2 == 0)
        lengths = [8 + place * has_signal for place in range(body["n"])]
        samples = [{"token_ids": encode_ids([*ids, *ids][-length:]), "finish_reason": "stop"} for length in lengths]
        samples = [one | {"logprobs": encode_floats([-5.0] * n)} for one, n in zip(samples, lengths, strict=True)]
        return {"version": body["version"], "samples": samples}

    replica.before["generate"] = answer
    keys = server_keys(replica) | {"train.per_device_train_batch_size": 16, "rollout.resample_rounds": 8}
    keys |= {"reward.functions": "[tests.smoke.test_resampling:by_length]", "reward.options": "{}"}
    run = RunDir(tmp_path / "run")
    done = recipe(recipe_arguments(tiny_model_dir, run.path, keys))
    assert done.code == 0, f"{done.out}\n{done.err}"
    metrics = read_jsonl(run.metrics_file)
    assert len(asked) == sum(4 + row["resampled_groups"] for row in metrics) > 8, "a prompt is asked for once"
    assert sum(asked) == sum(row["kept_fraction"] * (4 + row["resampled_groups"]) for row in metrics)
    assert [row["no_signal_fraction"] for row in metrics] == [0, 0]
    assert metrics[0]["sync_seconds"]["stage"] > 0 and metrics[0]["sampler_k3"] > 0
    for row in metrics:
        trained = read_jsonl(run.completions / f"step-{row['step']:06d}.jsonl")
        for place in range(0, 16, 4):
            assert len({line["advantage"] for line in trained[place : place + 4]}) > 1, "every group teaches"
        assert {line["adapter_version"] for line in trained} == {row["step"] - 1}


def test_what_a_server_sampled_is_replayed_with_its_log_probs_and_compared_with_the_policy_once(
    tmp_path, recipe, recipe_arguments, tiny_model_dir, read_jsonl, request
):
    """Half of the prompts of the first step have signal, none of the second."""
    replica, seen = fake_replica(tiny_model_dir), []
    request.addfinalizer(replica.stop)

    def answer(body: dict) -> dict:
        ids, version = decode_ids(body["token_ids"]), int(body["version"])
        lengths = [8 + place * (version == 0 and sum(ids) % 2 == 0) for place in range(body["n"])]
        samples = [{"token_ids": encode_ids([*ids, *ids][-length:]), "finish_reason": "stop"} for length in lengths]
        samples = [
            one | {"logprobs": encode_floats([-5.0 - version] * len(decode_ids(one["token_ids"])))} for one in samples
        ]
        return {"version": body["version"], "samples": samples}

    replica.before["generate"] = answer
    keys = server_keys(replica) | {"train.per_device_train_batch_size": 16, "rollout.replay_steps": 1}
    keys |= {"reward.functions": "[tests.smoke.test_resampling:by_length]", "reward.options": "{}"}
    run = RunDir(tmp_path / "run")
    with watching(seen):
        done = recipe(recipe_arguments(tiny_model_dir, run.path, keys))
    assert done.code == 0, f"{done.out}\n{done.err}"
    first, second = read_jsonl(run.metrics_file)
    assert second["replayed_groups"] == 4 * (1 - first["no_signal_fraction"]) > 0 and second["replay_lag"] == 1
    inputs = seen[-1]
    is_old = inputs.sampler_logps[:, 0] == -5.0
    assert is_old.sum() == 4 * second["replayed_groups"] and not torch.equal(
        inputs.logps[is_old], inputs.old_logps[is_old]
    )
    own = [value[~is_old] for value in (inputs.logps, inputs.sampler_logps, inputs.mask)]
    assert (
        torch.equal(own[0], inputs.old_logps[~is_old])
        and (inputs.sampler_logps[~is_old] * own[2])[:, 0].eq(-6.0).all()
    )
    assert second["sampler_k3"] == pytest.approx(measure(*own, "none", 2.0)["sampler_k3"], rel=1e-6)


def test_groups_of_episodes_are_replaced_and_a_resume_repeats_them(
    tmp_path, recipe, recipe_arguments, tools_model_dir, read_jsonl
):
    """The calculator pays for its calls; two episodes of a group often make as many."""
    keys = {"environment.factory": f"{HERE}:CountingCalculator", "environment.max_turns": 3, "rollout.group_size": 2}
    keys |= {"rollout.max_prompt_length": 100, "rollout.max_completion_length": 64, "rollout.resample_rounds": 2}
    keys |= {"train.save_steps": 1, "watch.completions_every": 1}
    whole, again = RunDir(tmp_path / "run"), RunDir(tmp_path / "again")
    for run, steps, flags in ((whole, 3, ()), (again, 2, ()), (again, 3, ("--resume",))):
        done = recipe(recipe_arguments(tools_model_dir, run.path, keys | {"train.max_steps": steps}, flags))
        assert done.code == 0, f"{done.out}\n{done.err}"
    assert_equal_runs(again, whole, read_jsonl, but={"total_steps"})
    metrics = read_jsonl(whole.metrics_file)
    assert sum(row["resampled_groups"] for row in metrics) > 3 and any(row["grad_norm"] > 0 for row in metrics)
    for row in metrics:
        rows = read_jsonl(whole.completions / f"step-{row['step']:06d}.jsonl")
        teaching = {one["problem_id"] for one in rows if one["advantage"]}
        assert len(rows) == 16 and len(teaching) == round(8 * (1 - row["no_signal_fraction"]))
        assert all(one["turn_versions"] and set(one["turn_versions"]) == {row["step"] - 1} for one in rows)
