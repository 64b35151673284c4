"""What a step of the trainer counts, records, saves and refuses, without a model: TRL's part is a stand-in."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer
from trl import GRPOTrainer, import_utils

from kit.core.chat import question_messages
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir, read_manifest, write_manifest
from kit.policy.stop_texts import StopTexts
from kit.rollout.policy_view import Report, Rollouts
from kit.train import trainer as module
from kit.train.checkpoint import staging_directory
from kit.train.figures import StepFigures
from kit.train.loss import LossSettings
from kit.train.trainer import METRICS, NewWeights, PolicyTrainer, Sampled, loss_settings, trainer_arguments
from tests.conftest import CONFIG

NAN, INF = math.nan, math.inf


class Accelerator:
    num_processes, process_index, is_main_process = 1, 0, True
    device, scaler = torch.device("cpu"), None

    def reduce(self, tensor, how):
        return {"sum": tensor * self.num_processes, "mean": tensor}[how]

    def wait_for_everyone(self):
        pass

    def unwrap_model(self, model):
        return model


class Recorder:
    def __init__(self):
        self.steps, self.written, self.ledgers, self.said = [], {}, [], []
        self.step, self.say = self.steps.append, self.said.append

    def wants_completions(self, step):
        return step % 2 == 1

    def completions(self, step, rows):
        self.written[step] = rows

    def ledger(self, step, problem_ids):
        self.ledgers.append((step, problem_ids))


@pytest.fixture
def policy(tmp_path):
    """`policy(*changes, attribute=value)`: a trainer after step 6, without a model."""

    def make(*changes: str, **attributes):
        made = PolicyTrainer.__new__(PolicyTrainer)
        figures = StepFigures(torch.device("cpu"))
        figures.version = 5
        facts = {
            "config": load_config(CONFIG, list(changes)),
            "run": RunDir(tmp_path / "run"),
            "policy": SimpleNamespace(base_hash="ab12", is_split=False),
            "accelerator": Accelerator(),
            "state": SimpleNamespace(global_step=6, max_steps=80, log_history=[]),
            "args": SimpleNamespace(max_steps=80),
            "model": torch.nn.Linear(2, 2),
            "passes": 0,
            "figures": figures,
            "recorder": Recorder(),
            "heldout": None,
            "reward_funcs": [],
            "reward_func_names": ["math"],
            "reward_weights": torch.ones(2),
            "optimizer": SimpleNamespace(state={}),
            "_unknown": {},
            "_unknown_before": {},
            "_metrics": {"train": defaultdict(list)},
        }
        for name, value in (facts | attributes).items():
            object.__setattr__(made, name, value)
        made.run.path.mkdir(exist_ok=True)
        return made

    return make


SETTINGS = {  # key of the configuration -> (value, field of TRL's arguments)
    "run.seed": (7, "seed"),
    "train.max_steps": (321, "max_steps"),
    "train.learning_rate": (3e-4, "learning_rate"),
    "train.lr_scheduler": ("cosine", "lr_scheduler_type"),
    "train.warmup_steps": (11, "warmup_steps"),
    "train.loss_type": ("dapo", "loss_type"),
    "train.scale_rewards": ("batch", "scale_rewards"),
    "train.beta": (0.07, "beta"),
    "train.epsilon": (0.17, "epsilon"),
    "train.epsilon_high": (0.31, "epsilon_high"),
    "train.delta": (4.5, "delta"),
    "train.importance_sampling_level": ("sequence", "importance_sampling_level"),
    "train.entropy_coef": (0.002, "entropy_coef"),
    "train.num_iterations": (3, "num_iterations"),
    "train.mask_truncated": (True, "mask_truncated_completions"),
    "train.per_device_train_batch_size": (20, "per_device_train_batch_size"),
    "train.gradient_accumulation_steps": (4, "gradient_accumulation_steps"),
    "train.max_grad_norm": (0.6, "max_grad_norm"),
    "train.weight_decay": (0.03, "weight_decay"),
    "train.optimizer": ("adafactor", "optim"),
    "train.save_steps": (9, "save_steps"),
    "rollout.group_size": (5, "num_generations"),
    "rollout.max_completion_length": (19, "max_completion_length"),
    "rollout.temperature": (0.8, "temperature"),
    "rollout.top_p": (0.9, "top_p"),
    "rollout.top_k": (12, "top_k"),
    "rollout.correction": ("sequence_mask", "vllm_importance_sampling_mode"),
    "rollout.correction_cap": (3.5, "vllm_importance_sampling_clip_max"),
    "reward.weights": ([0.25], "reward_weights"),
}


def test_every_setting_reaches_trl_in_its_own_field(tmp_path):
    keys = [
        f"--{key}={json.dumps(value) if isinstance(value, list) else value}" for key, (value, _) in SETTINGS.items()
    ]
    arguments = trainer_arguments(load_config(CONFIG, keys), RunDir(tmp_path))
    assert {name: getattr(arguments, name) for _, name in SETTINGS.values()} == dict(
        (name, value) for value, name in SETTINGS.values()
    )
    assert arguments.vllm_importance_sampling_correction and arguments.save_strategy == "steps"
    assert arguments.logging_steps == 1 and arguments.logging_nan_inf_filter is False
    assert not arguments.remove_unused_columns and not arguments.use_vllm and not arguments.gradient_checkpointing
    assert arguments.output_dir == str(staging_directory(RunDir(tmp_path)))


def test_every_setting_of_the_loss_comes_from_its_own_key(tmp_path):
    trl = {"delta": 1.5, "importance_sampling_level": "sequence", "use_bias_correction_kl": True}
    trl |= {"off_policy_mask_threshold": 0.125, "top_entropy_quantile": 0.25, "entropy_coef": 0.0625}
    trl |= {"vllm_importance_sampling_clip_min": 0.75, "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5}
    keys = [f"--train.trl={json.dumps(trl)}", "--train.loss_type=dapo", "--train.beta=0.5", "--train.epsilon=0.3"]
    keys += ["--rollout.max_completion_length=40", "--rollout.correction=token_mask", "--rollout.correction_cap=1.25"]
    wanted = LossSettings(
        loss_type="dapo",
        beta=0.5,
        epsilon=0.3,
        epsilon_high=0.3,
        delta=1.5,
        importance_sampling_level="sequence",
        sapo_temperature_pos=1.5,
        sapo_temperature_neg=2.5,
        bias_corrected_kl=True,
        off_policy_threshold=0.125,
        top_entropy_quantile=0.25,
        entropy_coef=0.0625,
        max_completion_length=40,
        correction="token_mask",
        correction_cap=1.25,
        correction_floor=0.75,
    )
    for more, high in (([], 0.3), (["--train.epsilon_high=0.4"], 0.4)):
        config = load_config(CONFIG, keys + more)
        assert loss_settings(trainer_arguments(config, RunDir(tmp_path)), config) == replace(wanted, epsilon_high=high)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        (["--train.loss_type=dr_grpo"], "scale_rewards", "none"),
        (["--train.loss_type=grpo"], "scale_rewards", "group"),
        (["--train.loss_type=dapo"], "scale_rewards", "group"),
        (["--train.loss_type=gspo"], "loss_type", "grpo"),
        (["--train.loss_type=gspo"], "importance_sampling_level", "sequence"),
        (["--train.loss_type=gspo"], "scale_rewards", "group"),
        (["--train.beta=0.1", "--train.kl_in_reward=true"], "beta", 0.0),
        (["--train.trl={entropy_coef: 0.25}"], "entropy_coef", 0.25),
        (["--train.loss_type=dr_grpo", "--train.scale_rewards=group"], "scale_rewards", "group"),
        (["--rollout.correction=none"], "vllm_importance_sampling_correction", False),
        (["--train.recompute=full"], "gradient_checkpointing", True),
        (["--train.recompute=selective"], "gradient_checkpointing", True),
        (["--model.dtype=bfloat16"], "bf16", True),
        (["--model.dtype=float32"], "bf16", False),
        (["--train.gradient_accumulation_steps=3"], "per_device_train_batch_size", 64),
    ],
)
def test_what_a_setting_means_for_trl(tmp_path, changes, field, value):
    assert getattr(trainer_arguments(load_config(CONFIG, changes), RunDir(tmp_path)), field) == value


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_micro_batches_take_all_rows_of_a_step_and_leave_their_number_as_it_is(tmp_path, steps):
    keys = ["--train.per_device_train_batch_size=16", f"--train.gradient_accumulation_steps={steps}"]
    for more, wanted in (([], (16, steps)), (["--train.micro_batch_tokens=104"], (16 * steps, 1))):
        arguments = trainer_arguments(load_config(CONFIG, keys + more), RunDir(tmp_path))
        found = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
        assert found == wanted and arguments.generation_batch_size == 16 * steps


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module.GRPOConfig, "n_gpu", 2)
    with pytest.raises(BadInput, match=r"\b2 GPUs"):
        trainer_arguments(load_config(CONFIG), RunDir(tmp_path))


def test_trl_finds_vllm_as_before_once_its_trainer_is_imported():
    assert import_utils.is_vllm_available.__module__ == "trl.import_utils"


@pytest.mark.parametrize(
    ("changes", "served", "wanted"),
    [
        ([], False, []),
        ([], True, []),
        (["--rollout.correction=none"], True, []),
        (["--policy.init_adapter=runs/a"], False, ["weights of runs/a"]),
        (["--policy.adapter_dtype=bfloat16", "--policy.compute=fused"], False, ["computes fused"]),
        (["--policy.compute=fp8", "--policy.init_adapter=runs/a"], True, ["weights of runs/a", "computes fp8"]),
        (["--policy.quant_cfg=fp8"], False, ["quantized as fp8"]),
        (["--train.micro_batch_tokens=104"], False, ["packed"]),
    ],
)
def test_a_trainer_is_made_with_what_the_configuration_says_of_its_policy(
    tmp_path, monkeypatch, changes, served, wanted
):
    done, model = (
        [],
        SimpleNamespace(
            peft_config={"default": None},
            get_base_model=lambda: "the base",
            get_input_embeddings=lambda: SimpleNamespace(register_forward_pre_hook=lambda beat: None),
            named_modules=lambda: iter(()),
        ),
    )

    def made_by_trl(self, **_) -> None:
        self.model, self.ref_model, self.accelerator = model, None, Accelerator()
        self.args = trainer_arguments(config, RunDir(tmp_path))
        self.eos_token_ids, self._metrics, self._tokenizer = [2], {"train": {}}, None
        self.is_deepspeed_enabled = False

    callbacks = []
    monkeypatch.setattr(GRPOTrainer, "__init__", made_by_trl)
    monkeypatch.setattr(GRPOTrainer, "add_callback", lambda self, one: callbacks.append(type(one).__name__))
    monkeypatch.setattr(GRPOTrainer, "remove_callback", lambda self, one: None)
    monkeypatch.setattr(module, "prepare", lambda accelerator, model: None)
    for name in ("use_kernels", "use_recompute"):
        monkeypatch.setattr(module, name, lambda model, config: None)
    monkeypatch.setattr(module, "use_packed_attention", lambda model, is_split: done.append("packed"))
    monkeypatch.setattr(module, "use_adapted_experts", lambda model: 0)
    monkeypatch.setattr(module, "set_adapter_dtype", lambda model, dtype: done.append(dtype))
    monkeypatch.setattr(module, "load_adapter_weights", lambda model, folder: done.append(f"weights of {folder}"))
    monkeypatch.setattr(module, "use_fused_linears", lambda model, how, keeps: done.append(f"computes {how}"))
    quantize = lambda model, fmt, is_split: done.append(f"quantized as {fmt.name}")  # noqa: E731
    monkeypatch.setattr(module, "use_quantized_linears", quantize)
    config = load_config(CONFIG, changes)
    rollout = object() if served else None

    def make():
        return PolicyTrainer(config=config, run=RunDir(tmp_path), base_hash="ab", rollout=rollout)

    made = make()
    dtype = "bfloat16" if any("bfloat16" in key for key in changes) else "float32"
    assert [one for one in done if one != dtype] == wanted and done.count(dtype) == 1
    assert done.index(dtype) == ("packed" in wanted)
    guards = ["NewWeights"] * ("quantized as fp8" in wanted) + ["FiniteGradients", "FiniteAdapter"]
    assert callbacks == guards and (made.sampler is rollout) == served
    assert made.policy_step.settings == loss_settings(made.args, config)
    model.peft_config["ref"] = None
    with pytest.raises(CheckFailed, match="reference"):
        make()


REWARDS = [[1.0, 0.5], [NAN, 0.5], [1.0, NAN], [NAN, NAN], [0.0, 0.0], [2.0, 1.0]]


def test_a_completion_that_one_function_could_not_judge_is_masked_and_counted(policy, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, *_: torch.tensor(REWARDS))
    made = policy()
    for calls in (1, 2):
        rewards = made._calculate_rewards([], [], [], [])
        assert rewards.isnan().tolist() == [[any(map(math.isnan, row))] * 2 for row in REWARDS]
        assert rewards[0].tolist() == [1.0, 0.5] and rewards[5].tolist() == [2.0, 1.0]
        assert made.figures.counts == {"masked": 3 * calls, "completions": 6 * calls}
    assert made._record({}, 7)["masked_fraction"] == 0.5
    made.figures.counts.clear()
    assert made._record({}, 7)["masked_fraction"] is None
    assert made.figures.seconds["reward"] > 0


def test_rewards_that_could_not_be_computed_are_counted_over_processes_and_resumes(policy, monkeypatch):
    def judged() -> None: ...

    judged.unknown_counts = {"timeout": 2}
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, *_: torch.zeros(2, 2))
    monkeypatch.setattr(module, "gather_object", lambda one: [*one, {"judged": {"timeout": 1, "late": 4}}])
    made = policy(_unknown_before={"judged": {"timeout": 10}, "other": {"late": 1}}, reward_funcs=[judged, print])
    for _ in range(2):
        made._calculate_rewards([], [], [], [])
        expected = {"judged": {"timeout": 13, "late": 4}, "other": {"late": 1}}
        assert made._record({}, 7)["unknown_rewards"] == expected, "each process counts from its start"


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, 0.0, None])
def test_a_loss_or_norm_that_is_not_finite_ends_the_run_after_it_is_recorded(policy, monkeypatch, key, value):
    monkeypatch.setattr(GRPOTrainer, "log", lambda self, logs, start_time: None)
    made = policy()
    logs = {"loss": 0.25, "grad_norm": 1.5} | {key: value}
    if value is None or math.isfinite(value):
        made.log(logs)
    else:
        with pytest.raises(CheckFailed, match=rf"^step 6\b.*\b{key}\b.* not finite"):
            made.log(logs)
    assert len(made.recorder.steps) == 1


def test_a_step_is_recorded_with_what_it_counted_and_the_next_one_starts_from_nothing(policy, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "log", lambda self, logs, start_time: None)
    monkeypatch.setattr(module.time, "perf_counter", lambda: 100.0)
    made = policy()
    made.figures.started = 88.0
    made.figures.seconds |= {"rollout": 3.0, "reward": 1.0, "reference": 0.5, "heldout": 1.5, "sync": 0.7}
    made.figures.seconds["rollout_hidden"] = 2.0
    made.figures.counts |= {"completion_tokens": 600, "tokens": 900, "masked": 1, "completions": 8}
    made.figures.values |= {"sampler_k3": 0.02}
    given = {name: 0.1 + 0.01 * number for number, name in enumerate(METRICS)}
    made.log(given | {"rewards/math/mean": 0.4})
    (row,) = made.recorder.steps
    assert {ours: row[ours] for ours in METRICS.values()} == {ours: given[theirs] for theirs, ours in METRICS.items()}
    assert row["rewards"] == {"math": 0.4} and row["masked_fraction"] == 1 / 8 and row["sampler_k3"] == 0.02
    assert row["seconds"]["step"] == 12.0 and row["seconds"]["update"] == 12 - 3 - 1 - 0.5 - 1.5
    assert row["completion_tokens"] == 600 and row["rollout_tokens_per_s"] == 600 / 5
    assert row["update_tokens_per_s"] == 900 / 6
    # Update 6 learned from what version 5 sampled.
    assert (row["step"], row["total_steps"], row["adapter_version"], row["policy_lag"]) == (6, 80, 5, 0)
    assert {"update"} <= row["peak_gib"].keys()
    made.log(given)
    following = made.recorder.steps[1]
    assert following["completion_tokens"] == 0 and following["masked_fraction"] is None
    assert following["sampler_k3"] is None and following["seconds"] == dict.fromkeys(
        ("rollout", "reward", "sync", "step", "update"), 0.0
    )
    assert following["rollout_tokens_per_s"] is None and following["update_tokens_per_s"] is None
    made.log({"eval_loss": 1.0})
    made.model.eval()
    made.log(given)
    assert len(made.recorder.steps) == 2, "of training steps alone"


@pytest.mark.parametrize(("masks", "share", "known"), [(True, 1, False), (True, 0.9, True), (False, 1, True)])
def test_means_over_no_token_are_null(policy, masks, share, known):
    logs = {"completions/clipped_ratio": share, "kl": 0.1, "entropy": 0.2, "clip_ratio/region_mean": 0.3}
    row = policy(f"--train.mask_truncated={masks}")._record(logs, 7)
    found = row["kl"], row["entropy"], row["clip_fraction"]
    assert found == ((0.1, 0.2, 0.3) if known else (None, None, None))


@pytest.mark.parametrize(("version", "lag"), [(6, 0), (5, 1), (4, 2)])
def test_the_lag_is_the_number_of_updates_since_the_version_that_sampled(policy, version, lag):
    made = policy()
    made.figures.version = version
    assert made._record({}, 7)["policy_lag"] == lag


def test_completions_are_written_row_by_row_with_what_belongs_to_them(policy, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "log", lambda self, logs, start_time: None)
    rewards = [{"math": float(n), "form": 3.0 + n} for n in range(3)]
    prompts = [question_messages(f"p{n}", "system", None) for n in range(3)]
    prompts[1] = [{"role": "user", "content": "before"}, *prompts[1]]  # a conversation of the data
    completions = [[{"role": "assistant", "content": text}] for text in ("c0", "first", "c2")]
    completions[1] += [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "c1"}]
    episodes = [{}, {"messages": completions[1], "turn_versions": [6, 6]}, {}]
    settings = ("--watch.completions_per_step=2", "--data.system_prompt=system")
    made = policy(*settings, callback_handler=SimpleNamespace(callbacks=[]))
    made.golds = {"a": "7", "b": "8"}
    for step, tokens in ((6, 9), (7, 0), (7, 9)):
        made.state.global_step = step
        made._sampled = Sampled(list("aab"), prompts, completions, rewards, [-1.0, 0.0, 1.0], [5, 6, 5], episodes)
        made.figures.counts["completion_tokens"] = tokens
        made.log({"loss": 0.5})
    assert list(made.recorder.written) == [7], "of odd steps that generated"
    for number, row in enumerate(made.recorder.written[7]):
        assert row == {
            "problem_id": "aab"[number],
            "prompt": ("p0", prompts[1])[number],
            "completion": f"c{number}",
            "gold": "778"[number],
            "rewards": {"math": float(number), "form": 3.0 + number},
            "advantage": number - 1.0,
            "adapter_version": (5, 6, 5)[number],
            **episodes[number],
        }
    assert len(made.recorder.written[7]) == 2


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("due", [True, False])
def test_what_is_sampled_is_recorded_counted_and_followed_by_what_is_due(policy, overlap, due, processes):
    """Without a model: the order of the parts, and what they hand on, in the last of the processes."""
    order, asked = [], []
    made_ids = Rollouts([[1, 2], [3] * 5], None, 4, Report({"canary_delta": 0.1}, {"rollout_hidden": 0.5}))

    class Replicas:
        def generate(self, policy, prompt_ids):
            order.append(("generate", prompt_ids))
            return made_ids

        def begin(self, policy, prompt_ids):
            order.append(("begin", prompt_ids))
            return Report({}, {"sync": 0.125})

        def settle(self, policy):
            order.append("settled")
            return Report({"sync_seconds": {}}, {"sync": 0.125})

    def measure(sampler, policy, tokenize) -> float:
        order.append("held out")
        return 0.25

    def rewarded(rows, prompts, completions, ids) -> torch.Tensor:
        order.append("rewards")
        return torch.tensor([[9.0], [0.0]] * (processes - 1) + [[1.0], [0.0]])

    accelerator = Accelerator()
    accelerator.num_processes, accelerator.process_index = processes, processes - 1
    accelerator.gather = lambda tensor: tensor
    rows = [{"problem_id": name, "prompt": [{"content": name}]} for name in "ba"]
    made = policy(
        f"--rollout.overlap={overlap}",
        accelerator=accelerator,
        sampler=Replicas(),
        policy_step=SimpleNamespace(add_reference=lambda batch: order.append("reference"), dropouts=[]),
        heldout=SimpleNamespace(is_due=lambda step: asked.append(step) or due, measure=measure),
        _lookahead=SimpleNamespace(rows=lambda: [{"prompt": [{"content": "next"}]}]),
        _token_ids=lambda prompts: [[len(prompt[0]["content"])] * 3 for prompt in prompts],
        _tokenizer=SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, skip_special_tokens: list(map(str, ids))),
        eos_token_ids=[2],
        stop_texts=StopTexts(None, []),
        pad_to_multiple_of=None,
        mask_truncated_completions=True,
        multi_objective_aggregation="sum_then_normalize",
        num_generations=2,
        scale_rewards="none",
        reward_weights=torch.ones(1),
        _calculate_rewards=rewarded,
        _pending_metrics={},
        _pending_extra_logs={},
    )
    made.state.num_input_tokens_seen = 100
    batch = made.sample(rows)
    of_overlap, of_heldout = [("begin", [[4] * 3])] * overlap, ["settled"] * overlap + ["held out"]
    assert order == [("generate", [[1] * 3] * 2), *of_overlap, "rewards", *of_heldout * due, "reference"]
    assert made.recorder.ledgers == [(7, ["b", "a"])] and asked == [7]
    assert made.figures.counts == {"completion_tokens": 7 * processes, "tokens": 13 * processes}
    assert made.state.num_input_tokens_seen == 100 + 13 * processes
    assert made.figures.version == 4 and made.figures.values["canary_delta"] == 0.1
    assert made.figures.seconds["rollout_hidden"] == 0.5 and made.figures.seconds["sync"] == 0.125 * overlap * (
        1 + due
    )
    assert made.figures.values.get("heldout_accuracy") == (0.25 if due else None)
    assert batch["advantages"].tolist() == [0.5, -0.5]
    assert batch["completion_mask"].tolist() == [[1, 1, 0, 0, 0], [0] * 5], "the second has no end"
    assert [[*row.values()] for row in made._sampled.rewards[-2:]] == [[1.0], [0.0]]
    assert made._sampled.versions == [4, 4] and made._sampled.problem_ids == ["b", "a"]


def test_the_seconds_of_a_phase_add_up(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    figures = StepFigures(torch.device("cpu"))
    for _ in range(2):
        with figures.timed("rollout"):
            pass
    assert figures.seconds == {"rollout": 5.0}


def test_the_kept_step_has_every_row_and_the_adapter_of_this_process(policy):
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(2, 2), "lora": torch.nn.Linear(2, 3)})
    model["base"].requires_grad_(False)
    rows = [{"advantages": torch.tensor([1.0, NAN]), "note": "x"}, {"advantages": torch.ones(2)}]
    made = policy(model=model, _buffered_inputs=rows)
    made.accelerator.process_index = 3
    said = made.keep_step()
    file = made.run.not_finite / "step-000007-process-3.safetensors"
    assert str(file) in said
    kept = load_file(file)
    assert kept.keys() == {"adapter/lora.weight", "adapter/lora.bias", "rows-0/advantages", "rows-1/advantages"}
    assert torch.equal(kept["adapter/lora.weight"], model["lora"].weight)
    assert kept["rows-0/advantages"][0] == 1 and kept["rows-0/advantages"][1].isnan()


@pytest.mark.parametrize("quantized", [True, False])
def test_a_resume_restores_the_adapters_type_and_the_input_ranges(policy, monkeypatch, quantized):
    done = []
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda self, folder, model: done.append(("loaded", folder)))
    monkeypatch.setattr(module, "use_adapted_experts", lambda model: 0)
    monkeypatch.setattr(module, "set_adapter_dtype", lambda model, dtype: done.append(("type", dtype)))
    monkeypatch.setattr(module, "restore_quantizers", lambda model, folder: done.append(("ranges", folder)))
    keys = ["--policy.quant_cfg=nvfp4"] if quantized else []
    policy("--policy.adapter_dtype=bfloat16", *keys)._load_from_checkpoint("step-000004")
    wanted = [("loaded", "step-000004"), ("type", "bfloat16"), ("ranges", "step-000004")]
    assert done == wanted[: 2 + quantized]


def test_quantized_layers_hear_of_every_update(monkeypatch):
    heard = []
    monkeypatch.setattr(module, "forget_peaks", heard.append)
    NewWeights().on_optimizer_step(None, None, None, model="the policy")
    assert heard == ["the policy"]


@pytest.fixture
def saving(policy, monkeypatch):
    """A trainer that saves step 6; `order` is what was written, in order, `fails` what stops it."""

    def stage(self, model, trial) -> None:
        folder = staging_directory(made.run) / "checkpoint-6"
        folder.mkdir(parents=True)
        (folder / "optimizer.pt").write_bytes(b"x")
        order.append("state")
        if fails:
            raise fails[0]

    def publish(policy, folder, version, base_hash, gathered, ledger) -> None:
        folder.mkdir(parents=True)
        write_manifest(folder, "adapter", version=version, base_hash=base_hash)
        order.append("adapter")

    order, fails = [], []
    commit, rotate = module.commit_checkpoint, module.rotate
    monkeypatch.setattr(Trainer, "_save_checkpoint", stage)
    monkeypatch.setattr(module, "publish_adapter", publish)
    monkeypatch.setattr(module, "write_quantizer_state", lambda policy, folder: {"quant_cfg": folder.name})
    monkeypatch.setattr(module, "commit_checkpoint", lambda *a, **k: order.append("checkpoint") or commit(*a, **k))
    monkeypatch.setattr(module, "rotate", lambda *arguments: order.append("rotate") or rotate(*arguments))
    made = policy("--train.keep_checkpoints=1")
    return made, order, fails


def test_the_adapter_of_a_step_is_there_before_its_checkpoint_counts(saving):
    made, order, _ = saving
    older = made.run.checkpoints / "step-000003"
    older.mkdir(parents=True)
    write_manifest(older, "training-state")
    made._save_checkpoint(made.model, None)
    assert order == ["state", "adapter", "checkpoint", "rotate"] and not older.exists()
    manifest = read_manifest(made.run.newest_checkpoint())
    assert (manifest["step"], manifest["base_hash"], manifest["quant_cfg"]) == (6, "ab12", "checkpoint-6")
    assert read_manifest(made.run.newest_adapter())["version"] == 6
    assert read_manifest(made.run.newest_adapter())["base_hash"] == "ab12"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "saving step 6 failed: .*No space left"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
    ],
)
def test_a_save_that_the_disk_refused_leaves_nothing_and_another_error_is_itself(saving, error, said):
    made, order, fails = saving
    fails.append(error)
    with pytest.raises(RuntimeError if said is None else CheckFailed, match=said or "CUDA error"):
        made._save_checkpoint(made.model, None)
    assert order == ["state"] and list(made.run.checkpoints.glob("step-*")) == []
    assert staging_directory(made.run).exists() == (said is None)


@pytest.fixture
def resumed(policy, monkeypatch):
    """A run with checkpoints after steps 2, 4 and 6; what the training was started from."""
    started = []
    monkeypatch.setattr(
        PolicyTrainer,
        "train",
        lambda self, resume_from_checkpoint: started.append((resume_from_checkpoint, self.passes)),
    )
    made = policy()
    made.run.metrics_file.write_text(
        "".join(json.dumps({"step": step, "unknown_rewards": {"math": {"late": step}}}) + "\n" for step in range(1, 9))
    )
    for step in (2, 4, 6):
        (folder := made.run.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"epoch": step * 0.45}))
        write_manifest(folder, "training-state")
    (staging_directory(made.run) / "checkpoint-8").mkdir(parents=True)
    return made, started


def test_a_resume_starts_from_the_newest_checkpoint_in_its_pass_with_its_counts(resumed):
    made, started = resumed
    made.train_run(resume=True)
    assert started == [(str(made.run.checkpoints / "step-000006"), 2)]
    assert made._unknown_before == {"math": {"late": 6}}
    assert len(made.run.metrics_file.read_text().splitlines()) == 6 and not staging_directory(made.run).exists()


def test_a_run_that_starts_anew_takes_nothing_of_what_lies_there(resumed):
    made, started = resumed
    made.train_run(resume=False)
    assert started == [(None, 0)] and made._unknown_before == {} and not staging_directory(made.run).exists()


@pytest.mark.parametrize(("steps", "trains"), [(7, True), (6, False), (5, False)])
def test_a_run_that_made_all_its_steps_makes_no_further_one(resumed, steps, trains):
    made, started = resumed
    made.args.max_steps = steps
    made.train_run(resume=True)
    assert bool(started) == trains


def test_a_damaged_checkpoint_is_passed_over_and_named(resumed):
    made, started = resumed
    (made.run.checkpoints / "step-000006" / "trainer_state.json").write_text("{}")
    made.train_run(resume=True)
    assert started == [(str(made.run.checkpoints / "step-000004"), 1)]
    assert any("step-000006" in line for line in made.recorder.said)


@pytest.mark.parametrize(
    ("before", "processes", "is_anew"), [(2, 1, True), (1, 2, True), (2, 2, False), (None, 2, False)]
)
def test_a_process_seeds_itself_anew_after_a_checkpoint_of_another_number_of_processes(
    resumed, monkeypatch, before, processes, is_anew
):
    made, _ = resumed
    folder, seeds, loaded = made.run.checkpoints / "step-000006", [], []
    write_manifest(folder, "training-state", **({"processes": before} if before else {}))
    monkeypatch.setattr(made.accelerator, "num_processes", processes)
    made.args.seed = 7
    made.state.global_step = 6
    monkeypatch.setattr("kit.train.checkpoint.set_seed", seeds.append)
    monkeypatch.setattr(Trainer, "_load_rng_state", lambda self, checkpoint: loaded.append(checkpoint))
    for rank in range(processes):
        monkeypatch.setattr(made.accelerator, "process_index", rank)
        made._load_rng_state(str(folder))
    assert (len(set(seeds)), len(loaded)) == ((processes, 0) if is_anew else (0, processes))


def test_a_resume_records_and_prints_another_number_of_processes(resumed):
    made, _ = resumed
    write_manifest(made.run.checkpoints / "step-000006", "training-state", processes=4)
    made.train_run(resume=True)
    row = json.loads(made.run.resumes_file.read_text())
    assert (row["step"], row["processes_before"], row["processes"]) == (6, 4, 1)
    assert any(line.startswith("processes 4 -> 1: the same problems") for line in made.recorder.said)
