"""Runs with an environment by the recipe's command line: what they leave behind, a resume, packs, what is refused."""

import shutil

import pytest
import torch

from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from kit.train.step import StepTally
from tests.unit.episode_cases import HERE

CALCULATOR = {
    "environment.factory": f"{HERE}:CountingCalculator",
    "environment.max_turns": 3,
    "rollout.max_prompt_length": 100,
    "rollout.max_completion_length": 64,
    "train.max_steps": 4,
    "watch.completions_every": 1,
}
TIMED = ("time", "total_steps", "seconds", "peak_gib", "rollout_tokens_per_s", "update_tokens_per_s")


@pytest.fixture(scope="module")
def run(made_once, recipe, recipe_arguments, tools_model_dir):
    """A run of 4 steps on a calculator, whose calls are paid for."""

    def train(folder):
        done = recipe(recipe_arguments(tools_model_dir, folder, CALCULATOR))
        assert done.code == 0, done.err
        (folder / "stdout.txt").write_text(done.out)

    return RunDir(made_once("environment-run", train))


def timeless(rows):
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def test_metrics_and_plan_tell_of_the_episodes(run, read_jsonl):
    assert f"episodes  {HERE}:CountingCalculator; at most 3 turns, observe" in (run.path / "stdout.txt").read_text()
    rows = read_jsonl(run.metrics_file)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[0]["kl"] == 0.0
    for row in rows:
        assert row["rewards"].keys() == {"math", "CountingCalculator"}
        assert 1 <= row["episode_turns"] <= 3 and 0 <= row["unfinished_fraction"] <= 1
        assert row["tool_failures"] <= row["tool_calls"] and row["turn_lag"] == row["policy_lag"] == 0
        assert 0 < row["seconds"]["environment"] <= row["seconds"]["rollout"]
        assert row["unknown_rewards"] == {"math": {}, "CountingCalculator": {}}
    assert any(row["tool_calls"] > 0 and row["environment_tokens"] > 0 for row in rows)
    assert any(row["grad_norm"] > 0.001 for row in rows)


def test_completions_have_every_message_and_the_version_of_every_turn(run, read_jsonl):
    calls = 0
    for step in (1, 2, 3, 4):
        for row in read_jsonl(run.completions / f"step-{step:06d}.jsonl"):
            written = [message for message in row["messages"] if message["role"] == "assistant"]
            assert row["turn_versions"] == [step - 1] * len(written) and row["completion"] == written[-1]["content"]
            answers = [message["content"] for message in row["messages"] if message["role"] == "tool"]
            answers = [one for one in answers if "not found" not in one]  # of a tool that there is not
            if row["end"] == "done":
                assert row["rewards"]["CountingCalculator"] == len(answers) and row["messages"][-1] == written[-1]
            else:  # a call of the last turn was made and not read
                assert row["end"] in ("turns", "length") and row["rewards"]["CountingCalculator"] >= len(answers)
            calls += len(answers)
    assert calls > 10


def test_the_record_names_the_source_of_the_environment(run):
    facts = read_json(run.config_file)
    assert facts["own_environment"].keys() == {f"{HERE}:CountingCalculator"}
    assert len(facts["own_environment"][f"{HERE}:CountingCalculator"]) == 16


def test_a_resumed_run_repeats_the_uninterrupted_one(
    run, recipe, recipe_arguments, tools_model_dir, tmp_path, read_jsonl
):
    again = RunDir(tmp_path / "run")
    for steps, flags in ((2, ()), (4, ("--resume",))):
        keys = CALCULATOR | {"train.max_steps": steps}
        done = recipe(recipe_arguments(tools_model_dir, again.path, keys, flags))
        assert done.code == 0, done.err
    assert timeless(read_jsonl(again.metrics_file)) == timeless(read_jsonl(run.metrics_file))
    assert again.ledger_file.read_text() == run.ledger_file.read_text()
    for file in run.completions.iterdir():
        assert (again.completions / file.name).read_text() == file.read_text()
    names = [folder / "adapter_model.safetensors" for folder in (run.adapter_dir(4), again.adapter_dir(4))]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_held_out_problems_are_played_and_change_nothing(
    run, recipe, recipe_arguments, tools_model_dir, tmp_path, read_jsonl
):
    keys = CALCULATOR | {"watch.eval_every": 2, "watch.eval_problems": 8, "train.max_steps": 2}
    done = recipe(recipe_arguments(tools_model_dir, tmp_path / "run", keys))
    assert done.code == 0, done.err
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert all(0 < row["heldout_accuracy"] <= 1 for row in rows), "the share of episodes that were paid at least 1"
    plain = read_jsonl(run.metrics_file)
    assert [row["reward"] for row in rows] == [row["reward"] for row in plain[:2]]


def test_an_environment_that_is_too_often_unknown_stops_the_run(recipe, recipe_arguments, tools_model_dir, tmp_path):
    keys = CALCULATOR | {"environment.factory": f"{HERE}:Unknowable", "environment.on_tool_error": "unknown"}
    done = recipe(recipe_arguments(tools_model_dir, tmp_path / "run", keys))
    assert done.code == 1
    assert "the outcome of an episode of Unknowable is not known for" in done.err and "tool_raised" in done.err
    assert "environment.max_unknown_fraction allows 2.00%" in done.err and "the calculator is broken" in done.err


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"environment.factory": f"{HERE}:NoReset"}, "NoReset without a method reset"),
        ({"environment.tools": f"[{HERE}:untyped]"}, "the argument 'number' of untyped has no type"),
        ({"environment.factory": f"{HERE}:Needy"}, "reset of Needy needs an argument 'secret'"),
        ({"rollout.max_prompt_length": 20}, "rollout.max_prompt_length is 20. Raise it"),
        ({"reward.functions": "[]", "environment.factory": f"{HERE}:Counter"}, "there is nothing to learn from"),
    ],
)
def test_bad_input_is_refused_before_weights_load(
    recipe, recipe_arguments, tools_model_dir, tmp_path, monkeypatch, keys, said
):
    monkeypatch.setattr("kit.policy.load.load_policy_base", lambda *_: pytest.fail("weights are loaded"))
    done = recipe(recipe_arguments(tools_model_dir, tmp_path / "run", CALCULATOR | keys))
    assert (done.code, "Traceback" in done.err) == (2, False) and said in done.err


def test_a_model_without_a_template_for_tools_is_refused(recipe, recipe_arguments, tools_model_dir, tmp_path):
    model = shutil.copytree(tools_model_dir, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    done = recipe(recipe_arguments(model, tmp_path / "run", CALCULATOR, ("--dry_run",)))
    assert done.code == 2 and "cannot render tools" in done.err


@pytest.fixture(scope="module")
def batch(build_trainer, recipe_arguments, tools_model_dir, tmp_path_factory):
    """A trainer that is about to update, and the rows of its first step: several prompts in a group, cut episodes."""
    keys = CALCULATOR | {"environment.factory": f"{HERE}:NoisyCalculator", "rollout.max_completion_length": 40}
    trainer = build_trainer(recipe_arguments(tools_model_dir, tmp_path_factory.mktemp("runs") / "run", keys))
    torch.manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.02)
    rows = [dict(trainer.train_dataset[number // 4]) for number in range(16)]
    return trainer, trainer.sample(rows)


def gradients(trainer, rows):
    trainer.model.zero_grad()
    trainer.policy_step.tally = StepTally()
    trainer.accelerator.gradient_state._set_sync_gradients(False)
    loss = trainer.policy_step.loss(trainer.model, dict(rows), 1)
    loss.backward()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), found


def test_the_rows_of_a_step_are_what_this_file_needs(batch):
    _, rows = batch
    answers = rows["completion_mask"] * (1 - rows["sampled_mask"])
    assert answers.sum() > 20 and rows["num_items_in_batch"] == (rows["completion_mask"] * rows["sampled_mask"]).sum()
    prompts = {tuple(row) for row in rows["prompt_ids"][:4].tolist()}
    assert len(prompts) > 1, "a group with several prompts"
    assert rows["advantages"].abs().max() > 0.1


@pytest.mark.parametrize("loss", ["dr_grpo", "dapo", "grpo", "gspo", "cispo", "sapo"])
def test_what_an_environment_wrote_has_no_part_in_the_loss(batch, loss, monkeypatch):
    from dataclasses import replace

    trainer, rows = batch
    step = trainer.policy_step
    names = {"loss_type": loss}
    if loss == "gspo":
        names = {"importance_sampling_level": "sequence"}
    monkeypatch.setattr(step, "settings", replace(step.settings, beta=0.1, **names))
    plain, expected = gradients(trainer, rows)
    logps, answers = step._logps, 1 - rows["sampled_mask"]

    def changed(*arguments, **keys):
        found, entropies = logps(*arguments, **keys)
        noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) * 3 * answers
        return found + noise, entropies if entropies is None else entropies * (1 + answers)

    monkeypatch.setattr(step, "_logps", changed)
    other = {key: value for key, value in rows.items() if key != "ref_per_token_logps"}
    other["ref_per_token_logps"] = rows["ref_per_token_logps"] + 2.0 * answers
    loss_changed, found = gradients(trainer, other)
    assert loss_changed == plain != 0.0
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("share", [True, False])
def test_packs_of_episodes_give_the_padded_gradient(batch, share, monkeypatch):
    from kit.policy.packed.attention import use_packed_attention

    trainer, rows = batch
    plain, expected = gradients(trainer, rows)
    base = trainer.model.get_base_model()
    implementation = base.config._attn_implementation
    use_packed_attention(base)
    monkeypatch.setattr(trainer.config.train, "micro_batch_tokens", 400)
    monkeypatch.setattr(trainer.config.train, "share_prompts", share)
    own = {key: value for key, value in rows.items() if key != "ref_per_token_logps"}
    try:
        packed, found = gradients(trainer, own)
    finally:
        base.set_attn_implementation(implementation)
    assert packed == pytest.approx(plain, abs=1e-6)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-5 * gradient.abs().max().item() + 1e-7), name
