"""What kit/train/trainer.py takes for granted in trl: methods and their parameters, metric names, the version.

A failure here means that upstream moved: read its change, then adapt the trainer and this file together.
"""

import inspect
import re
from dataclasses import MISSING
from importlib import metadata
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.trainer.utils import RepeatSampler

from kit.core.config.load import load_config
from kit.core.config.schema import TrainConfig
from kit.core.config.trl_rules import INEXACT_ON_RESUME
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.train.finite import FiniteGradients
from kit.train.loss import LOSSES
from kit.train.trainer import METRICS, PolicyTrainer, trainer_arguments
from kit.train.trl_trainer import typed_fields

ROOT = Path(__file__).parents[2]
# Method of GRPOTrainer or of transformers' Trainer that the kit overrides -> its parameters in trl 1.16 and
# transformers 5.17, with their defaults.
OVERRIDDEN = {
    "__init__": None,  # called with keywords only; those are checked below
    "create_accelerator_and_postprocess": "(self)",
    "_get_train_sampler": "(self, dataset=None)",
    "get_batch_samples": "(self, epoch_iterator, num_batches, device)",
    "_prepare_inputs": "(self, generation_batch)",
    "_calculate_rewards": "(self, inputs, prompts, completions, completion_ids_list)",
    "compute_loss": "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    "log": "(self, logs, start_time=None)",
    "_save_checkpoint": "(self, model, trial)",
    "_load_from_checkpoint": "(self, resume_from_checkpoint, model=None)",
    "_load_rng_state": "(self, checkpoint)",
}
# What the kit calls of TRL.
CALLED = {
    "_generate_single_turn": "(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False)",
    "_tokenize_prompts": "(self, prompts)",
}
KEYWORDS = {"model", "reward_funcs", "args", "train_dataset", "processing_class", "peft_config"}
SOURCE = inspect.getsource(inspect.getmodule(GRPOTrainer))


def shape(function) -> str:
    """The parameters of a function without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_trl_is_the_version_the_overrides_were_written_for():
    version = metadata.version("trl")
    pins = re.findall(r"^trl==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert pins == [version]
    assert version.startswith("1.16."), f"trl {version}: go through this file, then state the new version here"
    assert "Written for trl 1.16." in inspect.getsource(inspect.getmodule(PolicyTrainer))


def test_every_override_is_known_here():
    upstream = {name for base in GRPOTrainer.__mro__[:-1] for name in vars(base)}
    ours = {name for name, value in vars(PolicyTrainer).items() if inspect.isfunction(value)}
    assert ours & upstream == OVERRIDDEN.keys()
    for name, parameters in (OVERRIDDEN | CALLED).items():
        assert parameters is None or shape(getattr(GRPOTrainer, name)) == parameters, name


def test_an_order_of_the_data_is_drawn_when_a_pass_begins_and_a_resumed_run_begins_in_its_own():
    one, other = (RepeatSampler(range(9), mini_repeat_count=1, batch_size=4, seed=7) for _ in range(2))
    first, second = list(one), list(one)
    assert first != second
    next(iter(other))
    assert list(other) == second
    loop = inspect.getsource(Trainer._inner_training_loop)
    assert "for epoch in range(epochs_trained, num_train_epochs)" in loop


def test_transformers_calls_backward_once_for_what_compute_loss_returns():
    step = inspect.getsource(Trainer.training_step)
    assert step.count("self.compute_loss(") == step.count("self.accelerator.backward(") == 1
    assert step.index("self._prepare_inputs(") < step.index("self.compute_loss(") < step.index(".backward(")
    assert "super().training_step(model, inputs, num_items_in_batch)" in inspect.getsource(GRPOTrainer.training_step)
    # Whose gradient is not divided by the accumulation steps once more: TRL's loss is already.
    assert GRPOTrainer.loss_is_scaled_for_ga is True
    assert "_set_sync_gradients(do_sync_step)" in inspect.getsource(Trainer._run_epoch)


def test_trls_buffer_is_the_one_that_the_kit_fills():
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "if self._step % generate_every == 0 or self._buffered_inputs is None:" in source
    order = ("shuffle_sequence_dict(", "split_tensor_dict(", "self._buffered_inputs[self._step % self.args.steps")
    assert [*map(source.index, order)] == sorted(map(source.index, order))


def test_the_longest_turn_is_set_in_trls_generation_config():
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "**generate_inputs, generation_config=self.generation_config" in source
    assert '"max_new_tokens": self.max_completion_length' in SOURCE


def test_every_setting_that_trls_loss_reads_is_one_of_the_kits_or_refused():
    read = set(re.findall(r"self\.args\.(\w+)", inspect.getsource(GRPOTrainer._compute_loss)))
    adaptive = {"entropy_target", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min"}
    assert "use_adaptive_entropy" in INEXACT_ON_RESUME
    other_loss = {name for name in read if name.startswith("vespo_")}
    named = {"delta", "use_bias_correction_kl", "steps_per_generation", "sapo_temperature_pos", "sapo_temperature_neg"}
    assert read - adaptive - other_loss == named
    assert {*LOSSES, "gspo"} == set(get_args(get_type_hints(TrainConfig)["loss_type"]))


def test_trls_kl_in_the_reward_is_the_sum_that_the_kit_subtracts():
    source = inspect.getsource(RLOOTrainer._generate_and_score_completions)
    for line in (
        "per_token_kl = old_per_token_logps - ref_per_token_logps",
        "kl = (per_token_kl * completion_mask).sum(-1)",
        "rewards = rewards - self.beta * kl",
    ):
        assert line in source


def test_the_constructor_takes_what_the_recipe_gives():
    parameters = inspect.signature(GRPOTrainer.__init__).parameters
    assert KEYWORDS <= parameters.keys()


def test_the_checkpoint_of_transformers_that_the_kit_calls_instead_of_trls():
    assert shape(Trainer._save_checkpoint) == "(self, model, trial)"
    ours = inspect.getsource(GRPOTrainer._save_checkpoint)
    # All that trl adds: a model card, which is not wanted, and the state of the adaptive entropy bonus.
    assert "create_model_card" in ours and "super()._save_checkpoint(model, trial)" in ours
    assert "use_adaptive_entropy" in ours
    assert len([line for line in ours.splitlines() if line.strip()]) <= 16


def test_the_reference_of_a_new_adapter_is_the_model_with_adapters_off():
    assert 'adapter_name="ref" if "ref" in model.peft_config else None' in SOURCE


def test_trl_still_casts_the_adapter_so_the_kit_still_has_to_undo_it():
    assert re.search(r"param\.data = param\.data\.to\(torch\.bfloat16\)", SOURCE)


def test_every_metric_of_a_run_has_a_value_in_every_step(tiny_run, read_jsonl):
    for row in read_jsonl(tiny_run.metrics_file):
        assert not [name for name in METRICS.values() if row[name] is None]


def test_what_the_rollout_server_takes_from_trl(build_trainer, recipe_arguments, tmp_path, tiny_model_dir):
    # The canary's forward and the stop tokens of a request.
    from trl.models.utils import disable_gradient_checkpointing

    assert shape(disable_gradient_checkpointing.__wrapped__) == "(model, gradient_checkpointing_kwargs=None)"
    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run"))
    assert trainer.processing_class.eos_token_id in trainer.eos_token_ids
    assert trainer.args.vllm_importance_sampling_clip_min is None


def test_the_gradient_guard_runs_between_clipping_and_the_optimizer():
    assert "on_pre_optimizer_step" in vars(FiniteGradients) and hasattr(TrainerCallback, "on_pre_optimizer_step")
    loop = inspect.getsource(Trainer._run_epoch)
    clip, hook, step = (loop.index(text) for text in ("_clip_grad_norm", "on_pre_optimizer_step", "optimizer.step()"))
    assert clip < hook < step


def test_the_fields_of_the_configuration_that_the_kit_sets_exist():
    fields = GRPOConfig.__dataclass_fields__
    for name in ("loss_type", "scale_rewards", "beta", "epsilon_high", "num_iterations", "mask_truncated_completions"):
        assert name in fields
    assert fields["logging_nan_inf_filter"].default is True  # why the kit sets it to False


def test_the_fields_of_trls_sampler_are_those_that_the_kit_knows():
    # What TRL gives to its sampler: whoever finds a new one here decides whether it changes the policy.
    given = SOURCE[SOURCE.index("            generation_kwargs = {\n") :]
    names = set(re.findall(r'^ +"(\w+)":', given[: given.index("}")], re.MULTILINE))
    assert names == {
        *("max_new_tokens", "do_sample", "pad_token_id", "bos_token_id", "eos_token_id", "temperature"),
        *("top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation"),
    }


@pytest.mark.parametrize("optimizer", ["galore_adamw", "adamw_torch_npu_fused"])
def test_an_optimizer_that_cannot_be_made_here_is_refused_before_anything_is_loaded(optimizer, tmp_path):
    config = load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml", [f"--train.optimizer={optimizer}"])
    with pytest.raises(BadInput, match=f"train.optimizer is {optimizer}, which cannot be created here: .* Use adamw"):
        trainer_arguments(config, RunDir(tmp_path))


@pytest.mark.parametrize(
    ("optimizer", "field", "said"),
    [("adamw_torch", "{adam_beta2: 2}", "Invalid beta parameter"), ("adamw_8bit", "{adam_epsilon: -1}", "epsilon")],
)
def test_numbers_that_an_optimizer_refuses_are_refused_before_weights_load(tmp_path, optimizer, field, said):
    keys = [f"--train.optimizer={optimizer}", f"--train.trl={field}"]
    config = load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml", keys)
    with pytest.raises(BadInput, match=f"train.optimizer is {optimizer}, which cannot be created here: .*{said}"):
        trainer_arguments(config, RunDir(tmp_path))


@pytest.mark.parametrize("key", ["learning_rate", "no_such_field"])
def test_a_field_that_breaks_the_kit_is_refused(key, tmp_path):
    config = load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml")
    config.train.trl = {"min_p": 0.0}
    trainer_arguments(config, RunDir(tmp_path))
    config.train.trl = {key: 1}
    with pytest.raises(BadInput, match=f"train.trl.{key}"):
        trainer_arguments(config, RunDir(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("adam_epsilon", "x", "must be a number, it is 'x' (str)"),
        ("delta", [4], "must be a number or null, it is [4] (list)"),
        ("data_seed", 1.5, "must be an integer or null, it is 1.5 (float)"),
        ("fp16_full_eval", 1, "must be true or false, it is 1 (int)"),
        ("generation_kwargs", 1, "must be a group of keys or text or null, it is 1 (int)"),
        ("optim_target_modules", 1, "must be null or text or a list of text, it is 1 (int)"),
        ("debug", 1, "must be text or a list of DebugOption, it is 1 (int)"),
    ],
)
def test_a_field_of_another_type_than_trl_s_is_refused(key, value, said, tmp_path):
    config = load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml")
    config.train.trl = {key: value}
    with pytest.raises(BadInput, match=re.escape(f"train.trl.{key} {said}")):
        trainer_arguments(config, RunDir(tmp_path))


def test_a_field_gets_the_type_that_trl_annotates_which_every_default_has(tmp_path):
    config = load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml")
    config.train.trl = {"adam_epsilon": "1e-9"}  # as YAML 1.1 reads it without a dot
    assert trainer_arguments(config, RunDir(tmp_path)).adam_epsilon == 1e-9
    defaults = {name: one.default for name, one in GRPOConfig.__dataclass_fields__.items() if one.default != MISSING}
    assert typed_fields(defaults) == defaults and len(defaults) > 100
