"""The GRPO recipe by its command line: what a run leaves behind, what it refuses, and what a step computes.

Runs and refusals in this process go through the recipe's own `main`, with the command line of a user.
"""

import json
import math
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from kit.core.config.recipe import DISTILLATION, PLAIN, QUANTIZED
from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir, write_manifest
from kit.core.run_files import read_json
from kit.train.mismatch import KEYS as MISMATCH
from tests import processes

KEYS = {
    *("step", "total_steps", "time", "loss", "reward", "reward_std", "rewards", "zero_spread_fraction", "kl"),
    *("entropy", "clip_fraction", "truncated_fraction", "completion_length", "masked_fraction", "grad_norm"),
    *("learning_rate", "rollout_tokens_per_s", "update_tokens_per_s", "seconds", "peak_gib", "adapter_version"),
}
OF_A_SERVER = {*MISMATCH, "canary_delta", "canary_k3", "sync_seconds"}
LOG_LINE = re.compile(
    r"step \d+/6 reward \S+ std \S+ kl \S+ entropy \S+ zero_spread \S+ clipped \S+ truncated \S+ length \S+ "
    r"grad_norm \S+ seconds \S+ \(rollout \S+ .*update \S+\)"
)


def test_metrics_have_every_key_at_every_step(tiny_run, read_jsonl):
    rows = read_jsonl(tiny_run.metrics_file)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row.keys() >= KEYS | OF_A_SERVER
        assert {"rollout", "reward", "update", "step"} <= row["seconds"].keys()
        assert {"rollout", "update"} <= row["peak_gib"].keys()
        assert row["total_steps"] == 6 and row["adapter_version"] == row["step"] - 1
        # What every in-process run must have a number for.
        for key in KEYS:
            assert row[key] is not None, (row["step"], key)
        assert all(row[key] is None for key in OF_A_SERVER)
        assert row["rewards"] == {"math": row["reward"]}
        assert 0 < row["seconds"]["rollout"] < row["seconds"]["step"]
    assert any(row["grad_norm"] > 0.01 for row in rows) and any(row["reward"] > 0 for row in rows)


def test_kl_is_zero_at_the_first_step_and_not_after(tiny_run, read_jsonl):
    kl = [row["kl"] for row in read_jsonl(tiny_run.metrics_file)]
    assert kl[0] == 0.0
    assert all(value > 0 for value in kl[1:])


def test_the_log_has_one_line_per_step_in_a_fixed_order_and_so_has_the_terminal(tiny_run):
    decided, *lines = (tiny_run.logs / "trainer.log").read_text().splitlines()
    assert decided.startswith("rollouts keep the weights they multiply with")
    assert len(lines) == 6 and all(LOG_LINE.fullmatch(line) for line in lines), lines
    printed = (tiny_run.path / "stdout.txt").read_text().splitlines()
    assert [line for line in printed if re.match(r"step \d+/", line)] == lines
    assert "base unchanged" in printed[-1] and printed[-1].startswith("done: 6 steps")


def test_completions_are_sampled_with_their_rewards_and_the_version_that_made_them(tiny_run, read_jsonl):
    ledger = {row["step"]: row["problem_ids"] for row in read_jsonl(tiny_run.ledger_file)}
    metrics = {row["step"]: row for row in read_jsonl(tiny_run.metrics_file)}
    assert sorted(file.name for file in tiny_run.completions.iterdir()) == [
        f"step-{step:06d}.jsonl" for step in (1, 2, 4, 6)
    ]
    for step in (1, 2, 4, 6):
        rows = read_jsonl(tiny_run.completions / f"step-{step:06d}.jsonl")
        assert len(rows) == 16
        assert list(dict.fromkeys(row["problem_id"] for row in rows)) == ledger[step]
        assert {row["adapter_version"] for row in rows} == {step - 1}
        mean = sum(row["rewards"]["math"] for row in rows) / 16
        assert mean == pytest.approx(metrics[step]["reward"])
        for group in range(4):
            assert abs(sum(row["advantage"] for row in rows[4 * group : 4 * group + 4])) < 1e-5
        assert all(set(row) >= {"prompt", "completion"} and "<|im" not in row["completion"] for row in rows)


def test_the_ledger_names_every_problem_once_in_an_epoch(tiny_run, read_jsonl):
    rows = read_jsonl(tiny_run.ledger_file)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    consumed = [problem for row in rows for problem in row["problem_ids"]]
    assert len(consumed) == len(set(consumed)) == 24


def test_the_configuration_on_disk_says_how_the_run_was_made(tiny_run):
    facts = read_json(tiny_run.config_file)
    assert facts["config"]["policy"]["lora_rank"] == 4 and facts["config"]["train"]["learning_rate"] == 1e-3
    assert facts["versions"]["trl"].startswith("1.16") and facts["versions"]["bitsandbytes"]
    assert facts["seed"] == 0 and facts["processes"] == 1
    assert facts["command"][0] == "grpo_qlora.py" and "--config" in facts["command"]


@pytest.mark.parametrize("file", [PLAIN, QUANTIZED, DISTILLATION])
def test_a_typo_is_refused_with_exit_code_2_before_anything_heavy_is_imported(file):
    command = [sys.executable, "-X", "importtime", file, "--config"]
    command += ["recipes/configs/grpo-tiny-nf4-cpu.yaml", "--train.bta", "0"]
    done = processes.run(command)
    assert done.returncode == 2
    assert "unknown key train.bta. Did you mean train.beta?" in done.stderr
    assert "Traceback" not in done.stderr and "kit.core.config.load" in done.stderr
    assert not re.search(r"\| +(torch|transformers|trl)$", done.stderr, re.MULTILINE)


def test_the_launcher_passes_a_refusal_on(launch, recipe_arguments, tmp_path):
    out, err = processes.finish(process := launch(recipe_arguments(tmp_path, tmp_path / "r", {"run.nme": "x"})))
    assert process.returncode != 0, out
    assert "error: " in err and "unknown key run.nme. Did you mean run.name?" in err


def test_a_dry_run_checks_everything_and_writes_nothing(
    tmp_path, recipe, recipe_arguments, tiny_model_dir, build_trainer
):
    arguments = recipe_arguments(tiny_model_dir, tmp_path / "run")
    done = recipe([*arguments, "--dry_run"])
    assert done.code == 0, done.err
    assert not (tmp_path / "run").exists()
    assert "4 problems x 4 completions of at most 24 tokens, 6 steps over 200 problems" in done.out
    # A configuration for a GPU is checked where there is none, as far as that goes.
    gpu = [*arguments, "--model.dtype=bfloat16", "--policy.kernels=liger", "--train.max_gpu_gib=9"]
    done = recipe([*gpu, "--dry_run"])
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("unchecked ")]
    assert "(train.max_gpu_gib, policy.kernels): there is none here" in line
    assert recipe(gpu).code == 2 and not (tmp_path / "run").exists()
    run = build_trainer(arguments).run
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")}
    done = recipe([*arguments, "--dry_run", "--overwrite"])
    assert done.code == 0, done.err
    assert {file: file.stat().st_mtime_ns for file in run.path.rglob("*")} == before


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (PLAIN, {}),
        (QUANTIZED, {"policy.quant_cfg": "fp8"}),
        (DISTILLATION, {"distill.teacher": "base", "policy.quant_cfg": "fp8"}),
    ],
)
def test_a_run_is_resumed_on_the_problems_that_it_was_started_on(
    tmp_path, recipe, recipe_arguments, tiny_model_dir, build_trainer, file, changes
):
    for name in ("train.jsonl", "heldout.jsonl"):
        shutil.copy(tiny_model_dir / name, tmp_path)
    words = recipe_arguments(tiny_model_dir, tmp_path / "run", {"data.path": tmp_path, **changes})
    run = build_trainer(words, file=file).run
    (checkpoint := run.checkpoints / "step-000002").mkdir(parents=True)
    (checkpoint / "optimizer.pt").touch()
    write_manifest(checkpoint, "training-state", quant_cfg=changes.get("policy.quant_cfg"))
    resume = [*words, "--resume", "--dry_run"]
    assert (done := recipe(resume, file)).code == 0, done.err
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(reversed(rows)))
    done = recipe(resume, file)
    assert done.code == 2 and "was started on 200 training problems, and the 200 that the config names now" in done.err
    (tmp_path / "train.jsonl").write_text("\n\n".join(rows))  # other bytes, the same problems
    assert (done := recipe(resume, file)).code == 0, done.err
    (tmp_path / "train.jsonl").write_text("\n".join(rows[1:]))
    assert "problems, and the 199 that" in recipe(resume, file).err
    run.data_file.unlink()  # a run of before there was one
    assert (done := recipe(resume, file)).code == 0, done.err


def step_of(trainer, read_jsonl) -> tuple[dict, dict[str, torch.Tensor]]:
    """(metrics, gradient of every adapter tensor) of a trainer's only step."""
    gradients = {}

    def keep(*_) -> None:
        named = trainer.model.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(keep)
    trainer.train_run(resume=False)
    return read_jsonl(trainer.run.metrics_file)[0], gradients


def varied_reward(prompts, completions, **_) -> list[float]:
    """A number that differs within every group, whatever the model says."""
    return [float(index % 3) for index in range(len(completions))]


def test_every_loss_takes_a_step_and_they_differ_on_the_same_rollouts(
    tmp_path, build_trainer, recipe_arguments, learning_model_dir, read_jsonl
):
    metrics, gradients = {}, {}
    for loss in ("dr_grpo", "dapo", "grpo"):
        changes = {"train.loss_type": loss, "train.max_steps": 1, "train.max_grad_norm": 1e9}
        trainer = build_trainer(recipe_arguments(learning_model_dir, tmp_path / loss, changes), [varied_reward])
        assert trainer.args.loss_type == loss
        assert trainer.args.scale_rewards == ("none" if loss == "dr_grpo" else "group")
        metrics[loss], gradients[loss] = step_of(trainer, read_jsonl)
    texts = [(tmp_path / loss / "completions" / "step-000001.jsonl").read_text() for loss in metrics]
    said = [[json.loads(line)["completion"] for line in text.splitlines()] for text in texts]
    assert said[0] == said[1] == said[2]
    losses = [row["loss"] for row in metrics.values()]
    for first, second in (("dr_grpo", "dapo"), ("dapo", "grpo"), ("dr_grpo", "grpo")):
        flat = [torch.cat([tensor.flatten() for tensor in gradients[loss].values()]) for loss in (first, second)]
        assert flat[0].norm() > 1e-3 and flat[1].norm() > 1e-3
        assert (flat[0] - flat[1]).norm() > 1e-2 * flat[0].norm(), (first, second)
    assert len({round(loss, 7) for loss in losses}) == 3, losses


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_scale_rewards_of_the_configuration_wins_over_the_default_of_the_loss(
    tmp_path, recipe_arguments, scale, tiny_model_dir
):
    from kit.core.config.load import parse_command
    from kit.train.trainer import trainer_arguments

    for loss in ("dr_grpo", "grpo"):
        changes = {"train.scale_rewards": scale, "train.loss_type": loss}
        config, _ = parse_command("x", recipe_arguments(tiny_model_dir, tmp_path, changes))
        assert trainer_arguments(config, RunDir(tmp_path)).scale_rewards == scale


def watched_step(trainer) -> tuple[list, list]:
    """(prompt ids, completion ids) of a trainer's only step."""
    seen = []
    generate = trainer.sampler.generate

    def watch(policy, prompt_ids):
        made = generate(policy, prompt_ids)
        seen.append((prompt_ids, made.token_ids))
        return made

    trainer.sampler.generate = watch
    trainer.train_run(resume=False)
    return seen[0]


def test_a_prompt_gets_the_chat_template_once_and_nothing_follows_the_stop_token(
    tmp_path, build_trainer, recipe_arguments, learning_model_dir, read_jsonl
):
    changes = {"train.max_steps": 1, "data.prompt_suffix": " Box it.", "data.system_prompt": "Be brief."}
    trainer = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
    prompts, completions = watched_step(trainer)
    tokenizer = trainer.processing_class
    for text in tokenizer.batch_decode(prompts):
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert text.endswith(" Box it.<|im_end|>\n<|im_start|>assistant\n")
        assert text.count("<|im_start|>user") == 1 and text.count("<|im_start|>") == 3
    stop = tokenizer.eos_token_id
    assert any(stop in ids for ids in completions)
    for ids in completions:
        assert stop not in ids[:-1] and tokenizer.pad_token_id not in ids


def test_truncated_completions_are_counted(tmp_path, build_trainer, recipe_arguments, learning_model_dir, read_jsonl):
    changes = {"train.max_steps": 1, "rollout.max_completion_length": 14}
    trainer = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
    _, completions = watched_step(trainer)
    stop = trainer.processing_class.eos_token_id
    cut = sum(stop not in ids for ids in completions)
    assert 0 < cut < 16 and all(len(ids) == 14 for ids in completions if stop not in ids)
    row = read_jsonl(trainer.run.metrics_file)[0]
    assert row["truncated_fraction"] == pytest.approx(cut / 16)
    assert row["completion_length"] == pytest.approx(sum(map(len, completions)) / 16)
    assert row["completion_tokens"] == sum(map(len, completions))


def test_a_checkpoint_does_not_grow_with_the_steps_before_it(
    tmp_path, recipe, recipe_arguments, learning_model_dir, monkeypatch
):
    """transformers keeps 1.6 KiB of logs a step in memory, and all of them in every checkpoint."""
    monkeypatch.setattr("kit.train.trainer.KEPT_LOGS", 2)
    run = RunDir(tmp_path / "run")
    done = recipe(recipe_arguments(learning_model_dir, run.path, {"train.max_steps": 4, "train.save_steps": 4}))
    assert done.code == 0, done.err
    history = read_json(run.newest_checkpoint() / "trainer_state.json")["log_history"]
    assert [one["step"] for one in history] == [3, 4]


def test_a_stop_text_ends_completions_which_are_learned_and_not_truncated(
    tmp_path, build_trainer, recipe_arguments, learning_model_dir, read_jsonl
):
    changes = {"train.max_steps": 1, "rollout.max_completion_length": 14, "rollout.stop": '["=", "+"]'}
    changes |= {"train.mask_truncated": True}
    trainer = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
    _, completions = watched_step(trainer)
    tokenizer = trainer.processing_class
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    stopped = [text[-1:] in ("=", "+") for text in texts]
    assert sum(stopped) > 4
    kept = tokenizer.batch_decode([ids for stop, ids in zip(stopped, completions, strict=True) if stop])
    assert all(text[-1:] in ("=", "+") for text in kept), "nothing follows the token that ended it, no padding either"
    assert not any("=" in text[:-1] or "+" in text[:-1] for text in texts)
    whole = [stop or tokenizer.eos_token_id in ids for stop, ids in zip(stopped, completions, strict=True)]
    row = read_jsonl(trainer.run.metrics_file)[0]
    assert row["truncated_fraction"] == pytest.approx(1 - sum(whole) / 16)
    assert row["completion_tokens"] == sum(map(len, completions)) and row["kl"] is not None


def test_what_no_token_tells_is_null(tmp_path, build_trainer, recipe_arguments, learning_model_dir, read_jsonl):
    changes = {"train.max_steps": 1, "rollout.max_completion_length": 1, "train.mask_truncated": True}
    trainer = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
    trainer.train_run(resume=False)
    row = read_jsonl(trainer.run.metrics_file)[0]
    assert row["truncated_fraction"] == 1 and row["completion_tokens"] == 16
    assert row["kl"] is row["entropy"] is row["clip_fraction"] is None, "no token is in the loss"


def test_a_reward_of_none_is_masked_and_counted_and_is_not_zero_in_the_mean(
    tmp_path, build_trainer, recipe_arguments, learning_model_dir, read_jsonl
):
    def sometimes(prompts, completions, **_):
        return [None if index % 4 == 0 else float(index % 4) for index in range(len(completions))]  # None 1 2 3

    changes = {"train.max_steps": 1}
    trainer = build_trainer(recipe_arguments(learning_model_dir, tmp_path / "run", changes), [sometimes])
    trainer.train_run(resume=False)
    row = read_jsonl(trainer.run.metrics_file)[0]
    assert row["masked_fraction"] == 0.25
    assert row["reward"] == row["rewards"]["sometimes"] == 2.0
    said = read_jsonl(trainer.run.completions / "step-000001.jsonl")
    assert [entry["rewards"]["sometimes"] for entry in said] == [None, 1.0, 2.0, 3.0] * 4
    assert [entry["advantage"] for entry in said] == pytest.approx([0.0, -1.0, 0.0, 1.0] * 4)


def test_a_reward_of_the_users_trains_by_its_options_from_the_directory_where_the_run_starts(
    tmp_path, monkeypatch, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    (tmp_path / "rewards_of_mine.py").write_text(
        "def brief(completions, *, most: int = 1, **columns):\n"
        "    return [min(most, len(one[0]['content'])) / most for one in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    run, name = RunDir(tmp_path / "run"), "rewards_of_mine:brief"
    keys = {"reward.functions": f'["math", "{name}"]', "reward.options": f'{{"{name}": {{"most": 9}}}}'}
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys | {"train.max_steps": 1, "train.save_steps": 1}))
    assert done.code == 0, done.err
    rows = read_jsonl(run.completions / "step-000001.jsonl")
    assert [row["rewards"][name] for row in rows] == pytest.approx(
        [min(9, len(row["completion"])) / 9 for row in rows]
    )
    mean = sum(row["rewards"][name] for row in rows) / len(rows)
    assert read_jsonl(run.metrics_file)[0]["rewards"][name] == pytest.approx(mean) and mean > 0
    assert len(read_json(run.config_file)["own_rewards"][name]) == 16


def test_a_loss_of_ones_own_trains_and_one_that_is_none_is_refused_before_weights_load(
    tmp_path, recipe, recipe_arguments, learning_model_dir, monkeypatch, read_jsonl
):
    (tmp_path / "losses_of_mine.py").write_text(
        "def push(inputs, settings):\n"
        "    each = -inputs.advantages[:, None] * inputs.logps\n"
        "    return (each * inputs.mask).sum() / inputs.step_tokens\n"
        "def row(inputs, settings):\n"
        "    return inputs.logps.sum(dim=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    run, keys = RunDir(tmp_path / "run"), {"train.loss": "losses_of_mine:push", "train.max_steps": 2}
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 0, done.err
    assert "loss      losses_of_mine:push, beta" in done.out
    rows = read_jsonl(run.metrics_file)
    assert all(row["grad_norm"] > 0 and row["entropy"] > 0 and row["clip_fraction"] == 0 for row in rows)
    assert len(read_json(run.config_file)["own_loss"]) == 16
    keys["train.loss"] = "losses_of_mine:row"
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "none", keys, ("--dry_run",)))
    assert done.code == 2 and "train.loss 'losses_of_mine:row' returned a tensor of shape (2,)" in done.err


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_adapter_changes(
    tmp_path, recipe, recipe_arguments, learning_model_dir, monkeypatch, read_jsonl
):
    from kit.train.trainer import PolicyTrainer

    compute, seen = PolicyTrainer.compute_loss, []

    def explode(self, *inputs, **others):
        seen.append(self)
        return compute(self, *inputs, **others) * (math.inf if self.state.global_step == 1 else 1.0)

    monkeypatch.setattr(PolicyTrainer, "compute_loss", explode)
    halves = {"train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2}
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", {"train.save_steps": 1, **halves}))
    assert done.code == 1
    assert "error: step 2: the gradient is not finite. The adapter was not updated" in done.err
    run = seen[-1].run
    kept = run.not_finite / "step-000002-process-0.safetensors"
    assert str(kept) in done.err
    rows, trained = load_file(kept), dict(seen[-1].model.named_parameters())
    for number, half in enumerate(seen[-1]._buffered_inputs):
        assert torch.equal(rows[f"rows-{number}/completion_ids"], half["completion_ids"])
        assert len(rows[f"rows-{number}/completion_mask"]) == 8
    assert not torch.equal(rows["rows-0/advantages"], rows["rows-1/advantages"]) and "rows-2/advantages" not in rows
    adapter = [name for name in rows if name.startswith("adapter/")]
    assert adapter and all(torch.equal(rows[name], trained[name.removeprefix("adapter/")]) for name in adapter)
    assert [row["step"] for row in read_jsonl(run.metrics_file)] == [1]
    saved = load_file(run.newest_adapter() / "adapter_model.safetensors")
    assert run.newest_adapter().name == "v000001"
    state = {name.replace(".default", ""): p for name, p in seen[-1].model.named_parameters() if p.requires_grad}
    assert saved.keys() == state.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[name].detach().cpu()), name


def test_a_loss_that_is_not_finite_ends_the_run_where_gradients_cannot_be_seen(
    tmp_path, recipe, recipe_arguments, learning_model_dir, monkeypatch
):
    from kit.train.finite import FiniteAdapter, FiniteGradients
    from kit.train.trainer import PolicyTrainer

    compute = PolicyTrainer.compute_loss
    monkeypatch.setattr(FiniteGradients, "on_pre_optimizer_step", lambda *arguments, **kwargs: None)
    monkeypatch.setattr(FiniteAdapter, "on_optimizer_step", lambda *arguments, **kwargs: None)  # nor weights
    monkeypatch.setattr(PolicyTrainer, "compute_loss", lambda *args, **others: compute(*args, **others) * math.inf)
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", {"train.save_steps": 1}))
    assert done.code == 1
    assert "error: step 1: loss and grad_norm not finite" in done.err
    assert not (tmp_path / "run" / "adapters").exists()


def test_an_adapter_that_an_update_made_infinite_is_neither_saved_nor_sampled_from(
    tmp_path, recipe_arguments, tiny_model_dir, build_trainer, read_jsonl
):
    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run", {"train.save_steps": 1}))
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)

    def spoil(*_) -> None:
        if trainer.state.global_step == 1:
            weight.data[0, 0] = math.inf

    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(spoil)
    with pytest.raises(CheckFailed, match=r"^step 2: 1 of 28 tensors of the adapter are not finite after the update"):
        trainer.train_run(resume=False)
    assert trainer.run.newest_adapter().name == "v000001" and len(read_jsonl(trainer.run.metrics_file)) == 1


def test_a_run_does_not_start_from_an_adapter_that_is_not_finite(
    tmp_path, recipe_arguments, tiny_model_dir, build_trainer
):
    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run"))
    next(p for p in trainer.model.parameters() if p.requires_grad).data[0, 0] = math.nan
    with pytest.raises(CheckFailed, match=r"^1 of 28 tensors of the adapter that training starts from are not finite"):
        trainer.train_run(resume=False)
