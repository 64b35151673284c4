"""A run in verl's words: the same arithmetic, losses, data and rewards, and refusals for what verl has no word for."""

import importlib.util
import json
import random
import re
import shlex
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from launch.export.files import override, run_file, write
from launch.export.translate import ACTOR, MODEL, ROLLOUT, Cluster, epochs, here, translate
from reward import reward_functions

ROOT = Path(__file__).parents[2]
EIGHT, TINY = "grpo-qwen3_8b-nf4-fp8-deepmath-8gpu", "grpo-tiny-nf4-cpu"


def config_of(name: str, *overrides: str):
    return load_config(ROOT / f"recipes/configs/{name}.yaml", list(overrides))


def values_of(name: str, *overrides: str, nodes: int = 1, gpus: int = 8, processes: int | None = None) -> dict:
    return translate(config_of(name, *overrides), Cluster(nodes, gpus), processes, False, Path("/out")).values


def test_the_eight_gpu_run_is_the_same_in_verl():
    values = values_of(EIGHT, nodes=4)
    expected = {
        f"{MODEL}.path": "Qwen/Qwen3-8B",
        f"{MODEL}.lora_rank": 16,
        f"{MODEL}.lora_alpha": 32,
        f"{MODEL}.target_modules": "all-linear",
        # 4 processes x 4 x 16 completions here, in groups of 8.
        "data.train_batch_size": 32,
        f"{ROLLOUT}.n": 8,
        f"{ACTOR}.ppo_mini_batch_size": 32,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.01,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.optim.lr": 2e-5,
        f"{ACTOR}.optim.lr_warmup_steps": 10,
        f"{ROLLOUT}.quantization": "fp8",
        "data.max_prompt_length": 1024,
        "data.max_response_length": 2048,
        "trainer.total_training_steps": 500,
        "trainer.nnodes": 4,
        "trainer.n_gpus_per_node": 8,
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    }
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.loss_type=dr_grpo"], {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 2048}),
        (["--train.loss_type=grpo"], {"loss_agg_mode": "seq-mean-token-mean"}),
        (["--train.beta=0"], {"use_kl_loss": False}),
        (["--train.trl={delta: 4.0}"], {"clip_ratio_c": 4.0}),
        (["--train.delta=4.0"], {"clip_ratio_c": 4.0}),
        (["--train.epsilon_high=null"], {"clip_ratio_high": 0.2}),
        (["--train.lr_scheduler=constant"], {"optim.lr_warmup_steps": 0}),
        (["--train.optimizer=adamw_bnb_8bit"], {"optim.optimizer_impl": "bitsandbytes.optim"}),
        # Both are two updates on each batch: 500 updates are 250 batches.
        (["--train.num_iterations=2", "--train.save_steps=50"], {"ppo_epochs": 2}),
        (["--policy.adapter_dtype=bfloat16"], {"fsdp_config.model_dtype": "bf16"}),
    ],
)
def test_a_setting_of_the_loss_or_optimizer_becomes_verls(overrides, expected):
    values = values_of(EIGHT, *overrides)
    assert {key: values.get(f"{ACTOR}.{key}") for key in expected} == expected
    if "ppo_epochs" in expected:
        assert (values["trainer.total_training_steps"], values["trainer.save_freq"]) == (250, 25)


@pytest.mark.parametrize(
    ("correction", "level", "threshold"),
    [
        ("token_truncate", "token", 2.0),
        ("token_mask", "token", "1e-06_2"),
        ("sequence_truncate", "sequence", 2.0),
        ("sequence_mask", "sequence", "1e-06_2"),
        ("none", None, None),
    ],
)
def test_the_correction_is_cut_or_masked_at_the_same_ratio(correction, level, threshold):
    values = values_of(EIGHT, f"--rollout.correction={correction}")
    prefix = "algorithm.rollout_correction.rollout_is"
    assert (values.get(prefix), values.get(f"{prefix}_threshold")) == (level, threshold)


@pytest.mark.parametrize(
    ("nodes", "gpus", "each", "micro"),
    # 4 x 6 x 16 = 384 completions are 16 on each of 24 GPUs: the largest part of 6 that divides them is 4.
    [(1, 1, 4, 4), (1, 8, 4, 4), (8, 8, 4, 4), (16, 8, 4, 2), (32, 8, 4, 1), (3, 8, 6, 4)],
)
def test_a_step_is_the_same_on_every_cluster_and_each_gpu_gets_whole_micro_batches(nodes, gpus, each, micro):
    values = values_of(EIGHT, f"--train.per_device_train_batch_size={each}", nodes=nodes, gpus=gpus)
    assert values["data.train_batch_size"] * values[f"{ROLLOUT}.n"] == 64 * each
    assert values[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] == micro
    assert 64 * each // (nodes * gpus) % micro == 0


def test_the_processes_here_are_what_the_yaml_says():
    assert here(config_of(EIGHT)) == 4
    assert here(config_of("grpo-qwen3_8b-nf4-fp8-1x24gb")) == 1
    assert here(config_of(EIGHT, "--train.gpus=[0, 1]")) == 2
    assert here(config_of(TINY)) == 1
    assert values_of(EIGHT, processes=2)["data.train_batch_size"] == 16


def test_an_adapter_on_routed_experts_is_refused_and_one_beside_them_is_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_local_experts": 8}))
    config = load_config(ROOT / "recipes/configs/grpo-tiny-moe-nf4-cpu.yaml", [f"--model.path={tmp_path}"])
    with pytest.raises(BadInput, match=r"mixture of experts \(num_local_experts 8\): .* no adapter on routed experts"):
        translate(config, Cluster(1, 8), None, False, tmp_path)
    config.policy.expert_rank = 0
    translate(config, Cluster(1, 8), None, False, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "cluster", "complaint"),
    [
        (["--distill.teacher_adapter=/none"], {}, "recipes/distill_qat.py trains this configuration"),
        (["--reward.functions=[math, length]"], {}, "names length: it counts tokens"),
        (["--train.scale_rewards=batch"], {}, "Use group or none"),
        (["--train.loss_type=gspo"], {}, "train.loss_type is gspo with ratios of a sequence"),
        (["--train.loss_type=sapo"], {}, "train.loss_type is sapo"),
        (["--rollout.replay_steps=2"], {}, "verl 0.9 replays no groups"),
        (["--rollout.resample_rounds=2"], {}, "main_ppo of verl 0.9 replaces no groups"),
        (["--data.pass_rates=rates.jsonl"], {}, "the export writes all problems"),
        (["--train.kl_in_reward=true"], {}, "the export knows the KL in the loss only"),
        (["--environment=a:B"], {}, "the group environment is set"),
        (["--train.lr_scheduler=linear"], {}, "verl has constant and cosine"),
        (["--train.optimizer=adafactor"], {}, "train.optimizer is adafactor"),
        (["--policy.use_rslora=true", "--policy.lora_rank=8"], {}, "90.51 is none"),
        ([], {"gpus": 6}, "a step has 256 completions (4 per device x 4 processes x 16), which 6 GPUs"),
        (["--server.tensor_parallel=3", "--server.gpus=null"], {}, "server.tensor_parallel 3 does not divide"),
        (["--policy.lora_rank=1024"], {}, "is above 512, the largest that vLLM serves"),
        (["--rollout.group_size=7"], {}, "must divide the generation batch"),
        ([], {"gpus": 0}, "--gpus_per_node must be at least 1"),
    ],
)
def test_what_verl_cannot_do_is_refused(overrides, cluster, complaint):
    with pytest.raises(BadInput) as refused:
        values_of(EIGHT, *overrides, **cluster)
    assert complaint in str(refused.value)


def test_what_is_lost_is_said():
    overrides = ["--policy.lora_dropout=0", "--train.mask_truncated=true", "--train.trl={top_entropy_quantile: 0.5}"]
    overrides += ["--server.kv_cache=fp8", "--model.revision=main", "--rollout.stop=[END]"]
    found = translate(config_of(EIGHT, *overrides), Cluster(1, 8), None, False, Path("/out"))
    text = "\n".join(found.notes)
    lost = ["no QLoRA", "--dequantized_base keeps it", "blocks of 128 x 128 in place of fp8_per_channel"]
    lost += ["no rollout.sync remerge", "train.mask_truncated is lost", "train.trl.top_entropy_quantile"]
    lost += ["rollout.stop ['END'] is lost", "model.revision main is not passed", "the canary after each sync"]
    assert [words for words in lost if words not in text] == []
    added = {f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype": "fp8"}
    added["data.apply_chat_template_kwargs.enable_thinking"] = False
    assert {key: found.values[key] for key in found.added} == added
    with pytest.raises(BadInput, match="Write it with python -m merge base"):
        translate(config_of(EIGHT, "--server.base=nowhere"), Cluster(1, 8), None, True, Path("/out"))


def test_verl_makes_enough_passes_over_the_data():
    values = values_of(EIGHT)
    # 101,000 problems are 3,156 whole batches of 32, the rest of a pass is dropped.
    assert [epochs(size, values) for size in (101_000, 16_000, 15_999, 63, 32)] == [1, 1, 2, 500, 500]
    with pytest.raises(BadInput, match="a step draws 32 problems and there are 31"):
        epochs(31, values)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, list[dict]]:
    """An export of the tiny run with two rewards, and the problems it was made from."""
    folder = tmp_path_factory.mktemp("export run")
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    for split in ("train", "heldout"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        TINY,
        f"--data.path={folder}",
        "--data.system_prompt=Be brief.",
        "--data.prompt_suffix=\nUse \\boxed{}.",
        "--reward.functions=[math, boxed_format]",
        "--reward.weights=[1.0, 0.25]",
        "--reward.options={math: {tolerance: 0.01}}",
        "--eval.max_problems=10",
    )
    out = folder / "it's out"
    write(config, translate(config, Cluster(1, 8), None, False, out.resolve()), out, "python -m launch.export verl …")
    return out, rows


def test_the_parquet_files_have_verls_columns(exported):
    out, rows = exported
    table = pyarrow.parquet.read_table(out / "train.parquet").to_pylist()
    assert len(table) == 40
    assert len(pyarrow.parquet.read_table(out / "test.parquet")) == 10
    assert set(table[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    for index, (found, row) in enumerate(zip(table, rows, strict=True)):
        assert found["prompt"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{row['question']}\nUse \\boxed{{}}."},
        ]
        assert found["reward_model"] == {"style": "rule", "ground_truth": row["answer"]}
        assert (found["extra_info"]["index"], found["extra_info"]["split"]) == (index, "train")
        assert found["extra_info"]["prompt"] == found["prompt"]


@pytest.fixture
def reward_file(exported):
    """The module that the export writes for verl."""
    spec = importlib.util.spec_from_file_location("reward_function", exported[0] / "reward_function.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "score"),
    [
        *((r"It is \boxed{42}.", 1.25), (r"It is \boxed{42.1}.", 1.25), (r"It is \boxed{43}.", 0.25)),
        ("It is 42.", 0.0),
    ],
)
def test_the_reward_file_scores_as_the_kit_does(exported, reward_file, text, score):
    row = pyarrow.parquet.read_table(exported[0] / "train.parquet").to_pylist()[21]
    gold, extra = row["reward_model"]["ground_truth"], row["extra_info"]
    config = config_of(TINY, "--reward.functions=[math, boxed_format]", "--reward.options={math: {tolerance: 0.01}}")
    functions, _ = reward_functions(config.reward)
    found = reward_file.compute_score(row["data_source"], text, gold, extra_info=extra)
    ours = [one(prompts=[row["prompt"]], completions=[text], gold=[gold])[0] for one in functions]
    assert found == {"score": score, "unknown": 0.0, "math": ours[0], "boxed_format": ours[1]}
    assert score == ours[0] + 0.25 * ours[1]


def test_the_reward_file_hands_over_the_prompt_whose_repetition_pays_nothing(reward_file):
    example = r"The answer is \boxed{42}."
    prompt = [{"role": "user", "content": f"A solved one:\n{example}\nWhat is 21 + 21?"}]
    assert reward_file.compute_score("it", example, "42")["math"] == 1.0
    assert reward_file.compute_score("it", example, "42", extra_info={"prompt": prompt})["math"] == 0.0


def test_a_reward_that_could_not_be_computed_is_zero_and_says_so(reward_file, monkeypatch):
    def unknown(**_):
        return [None]

    unknown.__name__ = "math"
    monkeypatch.setattr(reward_file, "FUNCTIONS", [unknown, reward_file.FUNCTIONS[1]])
    found = reward_file.compute_score("it", r"\boxed{1}", "1")
    assert found == {"score": 0.0, "unknown": 1.0, "math": 0.0, "boxed_format": 1.0}


def test_the_yaml_says_what_the_command_says(exported):
    out, _ = exported
    nested = yaml.safe_load((out / "overrides.yaml").read_text())
    assert nested["defaults"] == ["ppo_trainer", "_self_"]
    words = shlex.split((out / "run.sh").read_text().partition("exec ")[2].replace("\\\n", " "))
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    for word in words[3:-1]:
        key, _, value = word.partition("=")
        found = nested
        for part in key.split("."):
            found = found[part]
        assert override(key, found, False) == f"{key}={value}"


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (True, "true"),
        (None, "null"),
        (1e-05, "1e-05"),
        ("a/b-c.d:1@x", "a/b-c.d:1@x"),
        ("it's", r"'it\'s'"),
        ("a=b, c", "'a=b, c'"),
        ("null", "'null'"),
        ("12", "'12'"),
        # To Python and to hydra these are numbers without the quotes.
        ("1e-06_2", "'1e-06_2'"),
        ("end\\", r"'end\\'"),
        (["q_proj", "v_proj"], "[q_proj,v_proj]"),
        ({"a": [1, 2]}, "{a:[1,2]}"),
    ],
)
def test_a_value_is_written_in_hydras_grammar(value, word):
    assert override("key", value, True) == f"+key={word}"


def test_the_command_survives_any_name_of_a_path():
    signs = "abc/ .'\"$`\\=,[]{}()#&;|<>*?!~\n"
    rng = random.Random(0)
    found = translate(config_of(EIGHT), Cluster(1, 8), None, False, Path("/out"))
    for _ in range(50):
        path = "".join(rng.choice(signs) for _ in range(12))
        found.values["data.train_files"] = path
        (word,) = [
            word for word in shlex.split(_command(run_file(found, "x"))) if word.startswith("data.train_files=")
        ]
        assert word == override("data.train_files", path, False)


def _command(text: str) -> str:
    return re.sub(r"\\\n  (?=\S)", " ", text.partition("exec ")[2])
