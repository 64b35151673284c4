"""Checks of several keys at once, and of the directory a run may write to."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from kit.core.config import float16_rules, optimizer_rules
from kit.core.config.checks import check_config
from kit.core.config.load import load_config, to_dict
from kit.core.config.run_checks import FREE_ON_RESUME, check_run_directory
from kit.core.config.schema import Config
from kit.core.config.shared_gpu import describe_split, replicas_beside_trainer, split_fault
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, write_json, write_manifest
from kit.core.run_files import read_json
from kit.core.run_state import lock_run
from tests.unit.test_accelerate_configs import announces

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"


def configuration(**changes) -> Config:
    """The shipped configuration with keys changed (`train__beta=0.1`)."""
    return load_config(CONFIG, [f"--{key.replace('__', '.')}={value}" for key, value in changes.items()])


def refusal(processes: int = 1, **changes) -> str:
    with pytest.raises(BadInput) as caught:
        check_config(configuration(**changes), processes)
    return str(caught.value)


def test_a_group_that_does_not_divide_the_batch_is_refused_with_the_numbers_and_the_sizes_that_fit():
    changes = {"train__per_device_train_batch_size": 2, "train__gradient_accumulation_steps": 4}
    assert refusal(2, rollout__group_size=6, **changes) == (
        "rollout.group_size (6) must divide the generation batch (2 per device x 2 processes x 4 steps = 16). "
        "Use 2, 4, 8, 16, or another batch."
    )
    check_config(configuration(rollout__group_size=8, **changes), 2)
    assert refusal(train__per_device_train_batch_size=1_048_573).endswith("= 1048573). Use another batch.")
    assert "a step would have 1,048,584 completions" in refusal(train__per_device_train_batch_size=1_048_584)


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp2"])
def test_formats_products_and_micro_batches_by_tokens_work_where_the_base_is_split(monkeypatch, name):
    for variable, value in announces(ROOT / f"accelerate_configs/{name}.yaml").items():
        monkeypatch.setenv(variable, value)
    longest = configuration().rollout.max_prompt_length + configuration().rollout.max_completion_length
    for change in ({"policy__quant_cfg": "nvfp4a16"}, {"policy__compute": "fp8"}, {"policy__compute": "fused"}):
        check_config(configuration(model__dtype="bfloat16", train__micro_batch_tokens=longest, **change), 2)


def test_the_number_of_processes_counts():
    changes = {"train__per_device_train_batch_size": 4, "rollout__group_size": 8}
    assert "4 per device x 1 processes x 1 steps = 4" in refusal(1, **changes)
    check_config(configuration(**changes), 2)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("at least 1", "train.max_steps=0 train.micro_batch_tokens=0 train.keep_checkpoints=0 train.save_steps=0"),
        ("at least 1", "server.max_num_seqs=0 server.tensor_parallel=0 rollout.max_in_flight=0 policy.lora_rank=-1"),
        ("at least 1", "data.max_train_problems=-5 eval.gate.min_problems=0 policy.quant_calib_size=0"),
        ("at least 2: an advantage is", "rollout.group_size=1"),
        ("0 or more", "rollout.retries=-1 rollout.canary_prompts=-1 watch.completions_every=-1 rollout.top_k=-1"),
        ("0 or more", "train.weight_decay=-0.1 train.beta=-0.1"),
        ("a number above 0", "rollout.temperature=0.0 train.learning_rate=-1.0"),
        ("a number above 0", "train.epsilon_high=-1.0 train.epsilon_high=0.0 server.kv_cache_gib=-1.0"),
        ("a number above 0", "train.max_gpu_gib=0.0 rollout.max_canary_delta=-1.0 rollout.max_sampler_k3=0.0"),
        ("above 0 and at most 1", "server.gpu_memory_utilization=1.2 server.gpu_memory_utilization=0.0"),
        ("between 0 and 1", "rollout.top_p=1.5 policy.lora_dropout=-0.1 eval.gate.min_parse_rate=5.0"),
        ("between 0 and 2147483647", "run.seed=-1 run.seed=4294967296"),
        ("at most 100 letters, digits", "run.name='a/b'"),
    ],
)
def test_a_value_beyond_its_limit_is_refused_with_its_key(words, settings):
    for setting in settings.split():
        key, value = setting.split("=")
        assert f"{key} ({value}) must be {words}" in refusal(**{key: value.strip("'")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("rollout.top_p=0.9", "rollout.top_p is 0.9 with rollout.correction token_truncate"),
        ("rollout.top_k=20", "rollout.top_k is 20 with rollout.correction token_truncate"),
        ("rollout.correction_cap=1.0", "rollout.correction_cap (1.0) must be above 1"),
        ("rollout.correction_cap=nan", "rollout.correction_cap is nan, which JSON cannot carry"),
        ("train.learning_rate=inf", "train.learning_rate is inf, which JSON cannot carry"),
        ("train.micro_batch_tokens=80", "train.micro_batch_tokens (80) is below rollout.max_prompt_length"),
        ("train.loss_type=cispo", "train.epsilon_high is None with train.loss_type cispo, whose ratio it caps"),
        ("train.loss_type=cispo train.epsilon_high=0.28", "train.epsilon_high is 0.28 with train.loss_type cispo"),
        (
            "train.loss_type=cispo train.epsilon_high=5.0 train.delta=4.0",
            "train.delta (4.0) does nothing with train.loss_type cispo. Remove it.",
        ),
        ("train.loss_type=sapo train.trl={'delta':4.0}", "train.delta (4.0) does nothing with train.loss_type sapo"),
        ("train.delta=1.2", "train.delta (1.2) must be above 1.2, 1 plus the upper clip"),
        ("train.trl={'sapo_temperature_neg':2.0}", "train.trl.sapo_temperature_neg does nothing with train.loss_type"),
        (
            "train.loss_type=sapo train.trl={'sapo_temperature_pos':0}",
            "train.trl.sapo_temperature_pos (0) must be above 0.",
        ),
        ("train.kl_in_reward=true train.beta=0", "train.kl_in_reward is true and train.beta 0, which weighs the KL."),
        (
            "train.kl_in_reward=true train.trl={'use_bias_correction_kl':true}",
            "train.trl.use_bias_correction_kl weighs the KL in the loss",
        ),
        (
            "train.kl_in_reward=true train.trl={'multi_objective_aggregation':'normalize_then_sum'}",
            "train.kl_in_reward with train.trl.multi_objective_aggregation normalize_then_sum",
        ),
        (
            "train.micro_batch_tokens=512 train.trl={'top_entropy_quantile':0.2}",
            "train.trl.top_entropy_quantile is 0.2 with train.micro_batch_tokens 512",
        ),
        ("policy.reference=none", "train.beta (0.01) is above 0 and policy.reference is none."),
        ("policy.reference=Qwen/Qwen3-8B", "policy.reference is 'Qwen/Qwen3-8B': a second model is never"),
        ("policy.reference=init_adapter", "policy.reference is init_adapter and policy.init_adapter is not set"),
        ("policy.reference=init_adapter train.beta=0", "policy.reference is init_adapter with train.beta 0, which"),
        ("policy.reference=init_adapter policy.lora_dropout=0.1", "init_adapter with policy.lora_dropout 0.1: the KL"),
        ("policy.reference=copy train.beta=0", "policy.reference is 'copy': a second model is never"),
        ("policy.target_modules=[q_proj,lm_head]", "policy.target_modules names ['lm_head']"),
        ("policy.target_modules=[model.embed_tokens]", "policy.target_modules names ['model.embed_tokens']"),
        ("policy.target_modules=[]", "policy.target_modules is empty."),
        ("policy.target_modules=everything", "policy.target_modules is 'everything'. Use all-linear or a list"),
        ("reward.functions=[]", "reward.functions is empty."),
        ("reward.weights=[1,2]", "reward.weights has 2 entries for 1 reward.functions."),
        ("reward.weights=[.nan]", "reward.weights holds nan, which JSON cannot carry"),
        ("reward.weights=[0]", "reward.weights ([0.0]) must be numbers, at least one of them not 0."),
        ("watch.report_to=[wandbb]", "watch.report_to must be a list of any of trackio, tensorboard, wandb, it is"),
        ("eval.formats=[fp4]", "eval.formats must be a list of any of bf16,"),
        ("eval.formats=[bf16]", "eval.gate.format (fp8) is not in eval.formats ['bf16']."),
        ("data.path=null", "data.id or data.path is missing"),
        ("train.num_iterations=2 train.save_steps=5", "train.save_steps (5) must be a multiple of train.num_iter"),
        ("train.num_iterations=2 train.max_steps=81 train.save_steps=2", "train.max_steps (81) must be a multiple"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(changes, message):
    assert message in refusal(**dict(setting.split("=") for setting in changes.split()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout__top_p": 0.9, "rollout__top_k": 20, "rollout__correction": "none"},
        {"policy__reference": "none", "train__beta": 0},
        {"train__epsilon_high": "null"},
        {"train__epsilon_high": 0.28},
        {"policy__lora_rank": 12},
        {"policy__lora_rank": 12, "rollout__backend": "server"},
        {"policy__lora_rank": 600, "rollout__backend": "server"},
        {"policy__lora_rank": 512, "rollout__backend": "server", "rollout__sync": "adapter"},
        {"rollout__backend": "server", "server__gpus": "[1, 3]", "server__tensor_parallel": 2},
        {"rollout__retries": 0, "rollout__canary_prompts": 0},
        {"policy__target_modules": "[q_proj, mlp.down_proj]"},
    ],
)
def test_settings_that_work_pass(changes):
    check_config(configuration(**changes), 1)


def test_everything_wrong_is_reported_at_once():
    found = refusal(rollout__group_size=7, policy__reference="copy", rollout__top_p=0.5, train__max_steps=-1)
    for key in ("rollout.group_size (7)", "policy.reference", "rollout.top_p", "train.max_steps (-1)"):
        assert key in found
    assert len(found.splitlines()) == 4


@pytest.mark.parametrize("backend", ["server", "in_process"])
@pytest.mark.parametrize(
    ("field", "where"),
    [
        ("deepspeed: zero3.json", "both"),
        ("fsdp: full_shard", "both"),
        ("fsdp_config: {version: 2}", "both"),
        ("parallelism_config: {tp_size: 2}", "both"),
        ("vllm_mode: colocate", "both"),
        ("vllm_importance_sampling_cap: 5", "both"),
        ("min_p: 0.1", "both"),
        ("repetition_penalty: 1.1", "both"),
        ("generation_kwargs: {typical_p: 0.9}", "both"),
        ("cache_implementation: static", "server"),
        ("use_transformers_paged: true", "both"),
        ("min_p: 0.0", "none"),
        ("repetition_penalty: 1.0", "none"),
        ("vllm_importance_sampling_clip_min: 0.5", "none"),
        ("chat_template_kwargs: {enable_thinking: false}", "both"),
    ],
)
def test_a_field_of_trl_that_would_not_do_what_it_says_is_refused(backend, field, where):
    changes = {"rollout__backend": backend, "train__trl": f"{{{field}}}"}
    if where in ("both", backend):
        assert f"train.trl.{field.partition(':')[0]} " in refusal(**changes)
    else:
        check_config(configuration(**changes), 1)


def test_the_trainers_own_sampler_may_be_another_one_without_a_correction():
    check_config(configuration(train__trl="{min_p: 0.1}", rollout__correction="none"), 1)


def shared(**changes) -> Config:
    changes = {"rollout__server_urls": ["http://127.0.0.1:8000", "http://localhost:8001"], **changes}
    return configuration(rollout__backend="server", **changes)


@pytest.mark.parametrize(
    ("changes", "environment", "replicas"),
    [
        ({}, {}, 1),  # GPU 0 for the trainer, 0 and 1 for the replicas
        ({"rollout__backend": "in_process"}, {}, 0),
        ({"rollout__server_urls": ["http://10.0.0.7:8000"]}, {}, 0),
        ({"server__gpus": [1, 2]}, {}, 0),
        ({"server__gpus": [0, 0]}, {}, 2),
        ({"server__gpus": [2, 3]}, {"CUDA_VISIBLE_DEVICES": "3,1"}, 1),
        ({"server__gpus": [2, 3]}, {"LOCAL_WORLD_SIZE": "2"}, 0),
        ({"server__gpus": [2, 3]}, {"LOCAL_WORLD_SIZE": "4"}, 1),
        ({"server__gpus": [0, 1, 2, 3], "server__tensor_parallel": 2}, {"CUDA_VISIBLE_DEVICES": "1"}, 1),
    ],
)
def test_replicas_on_the_trainers_gpu_are_counted(monkeypatch, changes, environment, replicas):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    changes = {"rollout__backend": "server", **changes}
    urls = changes.pop("rollout__server_urls", ["http://127.0.0.1:8000", "http://localhost:8001"])
    assert replicas_beside_trainer(configuration(rollout__server_urls=urls, **changes)) == replicas


def test_the_plan_says_how_a_gpu_is_shared():
    assert describe_split(shared(server__kv_cache_gib="null", server__gpu_memory_utilization=0.6)) == (
        "the trainer and a replica share a GPU: the replica takes 0.6 of the GPU, the trainer what it needs "
        "(train.max_gpu_gib is not set)"
    )
    line = describe_split(shared(server__kv_cache_gib=1.5, server__sleep=True, train__max_gpu_gib=9))
    assert (
        "its weights and 1.5 GiB of KV cache, and sleeps while the trainer updates, the trainer at most 9 GiB" in line
    )
    assert describe_split(shared(server__gpus=[6, 7])) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"train__max_gpu_gib": 9.7, "server__gpu_memory_utilization": 0.6, "server__kv_cache_gib": "null"},
            "14.4 GiB",
        ),
        ({"train__max_gpu_gib": 9.5, "server__gpu_memory_utilization": 0.6, "server__kv_cache_gib": "null"}, None),
        ({"train__max_gpu_gib": 20, "server__kv_cache_gib": 5}, "exceed its 24.0 GiB"),
        ({"train__max_gpu_gib": 15, "server__kv_cache_gib": 5, "server__gpus": [0, 0]}, "of 2 replicas"),
        ({"train__max_gpu_gib": 20, "server__kv_cache_gib": 5, "server__sleep": True}, None),
        ({"server__kv_cache_gib": 30}, None),
        ({"train__max_gpu_gib": 20, "server__kv_cache_gib": 5, "server__gpus": [6, 7]}, None),
    ],
)
def test_limits_that_do_not_fit_one_gpu_are_found(monkeypatch, changes, problem):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = split_fault(shared(**changes), 24.0)
    assert found is None if problem is None else problem in found


def test_a_replica_with_a_kv_cache_of_its_own_counts_with_its_weights(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = shared(train__max_gpu_gib=15, server__kv_cache_gib=5)
    assert split_fault(config, 24.0) is None
    assert split_fault(config, 24.0, 9.0) is None
    assert "server.kv_cache_gib (5) with weights and all else (14.2 GiB)" in split_fault(config, 24.0, 14.2)


def test_what_a_replica_takes_is_what_the_plan_says_of_it(monkeypatch):
    from kit.plan import memory, replica
    from kit.plan.gpus import CARDS
    from kit.plan.shapes import shape_by_size

    monkeypatch.setattr(replica, "parse_gpus", lambda _: (CARDS["rtx4090"], 1))
    config = shared(server__kv_cache_gib=2, model__path="null", model__id="Qwen/Qwen3-8B")
    parts = memory.server_parts(shape_by_size("8b"), config, CARDS["rtx4090"])
    assert replica.replica_gib(config) == sum(parts.values()) > 2 + parts["weights"]
    assert replica.replica_gib(config, {"model_type": "mixtral", "num_local_experts": 8}) is None


@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_an_optimizer_that_steps_in_the_backward_pass_goes_with_one_backward_pass_a_step(name):
    alone = {"train__optimizer": name, "train__gradient_accumulation_steps": 1}
    check_config(configuration(**alone), 1)
    for key, value in (("micro_batch_tokens", 4096), ("gradient_accumulation_steps", 2)):
        with pytest.raises(BadInput, match=f"train.optimizer is {name} with train.{key} {value}: it updates"):
            check_config(configuration(**alone | {f"train__{key}": value}), 1)
    check_config(configuration(train__optimizer="adamw_8bit", train__micro_batch_tokens=4096), 1)


def test_the_names_of_optimizers_are_transformers_own():
    from transformers.training_args import OptimizerNames

    assert set(optimizer_rules.OPTIMIZERS) == {one.value for one in OptimizerNames}
    with pytest.raises(BadInput, match=r"is adamw_tobch, .* Did you mean adamw_torch\?"):
        check_config(configuration(train__optimizer="adamw_tobch"), 1)


def run_with_checkpoint(folder: Path, config: Config, steps: tuple[int, ...] = (2,), **fields) -> RunDir:
    """A directory as a started run leaves it: configuration, base, and a whole checkpoint per step, whose manifest
    has `fields` beside."""
    run = RunDir(folder)
    folder.mkdir()
    write_json(run.config_file, {"config": to_dict(config), "processes": 1})
    write_json(run.base_file, {"hash": "00"})
    for step in steps:
        checkpoint = run.checkpoints / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "optimizer.pt").write_bytes(b"x" * 100)
        write_manifest(checkpoint, "training-state", step=step, **fields)
    return run


def directory_refusal(config: Config, resume: bool = False, processes: int = 1) -> str:
    with pytest.raises(BadInput) as caught:
        check_run_directory(config, resume, processes)
    return str(caught.value)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other" / "logs").mkdir(parents=True)
    (tmp_path / "other" / "logs" / "mine.txt").write_text("mine")
    for place, message in (
        (tmp_path, "exists and is not a run directory"),
        (tmp_path / "notes.txt" / "run", "notes.txt is not a writable directory"),
        (tmp_path / "other", "is not a run directory"),
        (tmp_path / "notes.txt", "is a file"),
    ):
        assert message in directory_refusal(configuration(run__output_dir=place))


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        ["config.json"],  # of a dry run
        ["logs/server-8000.log", "logs/server.json"],  # python -m launch.server starts before the trainer
        ["logs/check.log", "logs/base.log", "logs/server-8000.log", "logs/trainer.log"],  # of python -m launch.up
    ],
)
def test_a_directory_without_a_run_may_be_written_but_not_resumed(tmp_path, files):
    folder = tmp_path / "run"
    for name in files or ():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    if files == []:
        folder.mkdir()
    config = configuration(run__output_dir=folder)
    assert check_run_directory(config, resume=False, processes=1).path == folder
    assert "holds no started run. Leave --resume out" in directory_refusal(config, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"train__learning_rate": 5e-3}, "train.learning_rate was 0.001, is 0.005"),
        ({"policy__lora_rank": 8}, "policy.lora_rank was 16, is 8"),
        ({"data__max_train_problems": 10}, "data.max_train_problems was None, is 10"),
        ({"run__seed": 1}, "run.seed was 0, is 1"),
        ({"train__trl": "{top_entropy_quantile: 0.5}"}, "train.trl was {}, is {'top_entropy_quantile': 0.5}"),
    ],
)
def test_resume_needs_the_same_settings_and_names_another(tmp_path, changes, message):
    run_with_checkpoint(tmp_path / "run", configuration())
    config = configuration(run__output_dir=tmp_path / "run", **changes)
    assert "holds a run already. Continue it with --resume" in directory_refusal(config)
    if message:
        assert message in directory_refusal(config, resume=True)
    else:
        assert check_run_directory(config, resume=True, processes=1).newest_checkpoint().name == "step-000002"


def test_a_run_that_is_older_than_a_key_resumes_with_its_default_and_with_nothing_else(tmp_path):
    config = configuration(run__output_dir=tmp_path / "run")
    run = run_with_checkpoint(tmp_path / "run", config)
    written = read_json(run.config_file)
    del written["config"]["distill"], written["config"]["train"]["epsilon_high"]
    run.config_file.write_text(json.dumps(written))
    check_run_directory(config, resume=True, processes=1)
    other = configuration(run__output_dir=tmp_path / "run", train__epsilon_high=0.28)
    assert "train.epsilon_high was None, is 0.28" in directory_refusal(other, resume=True)


def test_resume_may_change_what_does_not_alter_the_learning(tmp_path):
    run_with_checkpoint(tmp_path / "run", configuration())
    changes = {"train__max_steps": 200, "train__save_steps": 5, "watch__completions_every": 1, "eval__max_problems": 9}
    changes |= {"rollout__sync": "adapter", "rollout__transport": "body", "rollout__max_in_flight": 8}
    changes |= {
        "server__weights": "bf16",
        "server__sleep": True,
        "train__max_gpu_gib": 10,
        "rollout__max_in_flight": 8,
    }
    assert set(FREE_ON_RESUME) >= {"train.max_steps", "train.save_steps", "watch", "eval"}
    check_run_directory(configuration(run__output_dir=tmp_path / "run", **changes), resume=True, processes=1)


def test_resume_without_a_whole_checkpoint_is_refused(tmp_path):
    config = configuration(run__output_dir=tmp_path / "run")
    run = run_with_checkpoint(tmp_path / "run", config)
    (run.checkpoints / "step-000002" / "optimizer.pt").write_bytes(b"x" * 99)
    assert "no whole training-state" in directory_refusal(config, resume=True)


def test_a_run_that_stopped_before_its_first_checkpoint_says_that_it_cannot_be_resumed(tmp_path):
    config = configuration(run__output_dir=tmp_path / "run")
    run_with_checkpoint(tmp_path / "run", config, steps=())
    for resume in (False, True):
        found = directory_refusal(config, resume)
        assert "stopped before its first checkpoint" in found and "Start over with --overwrite" in found


def test_a_configuration_file_that_is_damaged_is_named(tmp_path):
    config = configuration(run__output_dir=tmp_path / "run")
    run = run_with_checkpoint(tmp_path / "run", config)
    run.config_file.write_text(json.dumps({"config": to_dict(config)})[:-20])
    assert "config.json is not JSON" in directory_refusal(config, resume=True)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"train__lr_scheduler": "constant"}, None),
        ({"train__lr_scheduler": "cosine"}, "changes the whole schedule"),
        ({"policy__quant_noise_start": 0.1, "policy__quant_noise_end": 0.1}, "noise stages"),
    ],
)
def test_more_steps_need_a_constant_schedule(tmp_path, keys, reason):
    run_with_checkpoint(tmp_path / "run", configuration(**keys))
    more = configuration(run__output_dir=tmp_path / "run", train__max_steps=120, **keys)
    if reason is None:
        check_run_directory(more, resume=True, processes=1)
    else:
        assert reason in directory_refusal(more, resume=True)


def test_a_directory_is_trained_in_by_one_process_at_a_time(tmp_path):
    run = RunDir(tmp_path / "run")
    with lock_run(run), pytest.raises(BadInput, match="is being trained in by another process"):
        lock_run(run)
    lock_run(run).close()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rollout__server_urls": []}, "rollout.server_urls is empty"),
        ({"rollout__server_urls": ["localhost:8000"]}, "Write it as http://host:port"),
        ({"rollout__server_urls": ["http://a:1", "http://b:1", "http://a:1/"]}, "http://a:1 more than once"),
        ({"server__gpus": [0, 1, 2], "server__tensor_parallel": 2}, r"names 3 GPUs; 1 replicas .* 2 take 2\."),
        ({"server__gpus": [1, 1], "server__tensor_parallel": 2}, "must name every GPU once"),
        ({"server__max_num_seqs": 4}, r"server\.max_num_seqs \(4\) is below rollout\.group_size \(8\)"),
        ({"policy__lora_rank": 520, "rollout__sync": "adapter"}, "set rollout.sync to remerge, which takes any rank"),
        ({"policy__lora_dropout": 0.1}, "the server samples without dropout"),
        ({"server__force_w8a16": True}, "serve fp8_per_tensor and fp8_per_block. Set server.weights to one of them"),
        (
            {"server__force_w8a16": True, "server__weights": "fp8_per_block", "policy__quant_cfg": "fp8_block"},
            "the server would not compute in that format",
        ),
    ],
)
def test_servers_that_could_not_serve_the_run_are_refused(changes, complaint):
    with pytest.raises(BadInput, match=complaint):
        check_config(configuration(rollout__backend="server", **changes), 1)


def test_a_float32_model_is_not_silently_computed_in_bfloat16(monkeypatch):
    check_config(configuration(model__dtype="float32"), 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_config(configuration(model__dtype="bfloat16"), 1)
    for mixed in ("bf16", "fp16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed)
        with pytest.raises(BadInput, match="--mixed_precision no"):
            check_config(configuration(model__dtype="float32"), 1)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"policy__adapter_dtype": "bfloat16"}, "policy.adapter_dtype is bfloat16 .* Set it to float32"),
        ({"policy__quant_cfg": "w4a16"}, "formats are defined on BF16 weights"),
        ({"policy__compute": "fp8"}, "policy.compute is fp8 .* Set it to fused"),
        ({"policy__quantization": "fp8"}, "policy.quantization is fp8 .* Set it to nf4 or none"),
        ({"policy__kernels": "liger"}, "policy.kernels is liger .* Set it to torch"),
        ({"policy__compute": "fused", "policy__quantization": "none"}, None),
        ({}, None),
    ],
)
def test_what_float16_does_not_go_with_is_refused_by_name(keys, complaint):
    if complaint is None:
        check_config(configuration(model__dtype="float16", **keys), 1)
        return
    with pytest.raises(BadInput, match=complaint):
        check_config(configuration(model__dtype="float16", **keys), 1)
    check_config(configuration(model__dtype="bfloat16", **keys), 1)


def test_float16_under_deepspeed_or_fsdp_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(BadInput, match=r"model\.dtype is float16 under DeepSpeed"):
        check_config(configuration(model__dtype="float16"), 1)


def test_models_that_overflow_in_float16_are_those_of_vllm_and_are_refused():
    text = Path(find_spec("vllm").origin).with_name("config").joinpath("model.py").read_text()
    table = text.partition("_FLOAT16_NOT_SUPPORTED_MODELS = {")[2].partition("}")[0]
    assert tuple(re.findall(r'"(\w+)": "', table)) == float16_rules.OVERFLOWING
    config = configuration(model__dtype="float16")
    assert "the model is a gemma2, whose activations exceed" in float16_rules.model_fault(config, "gemma2")
    assert float16_rules.model_fault(config, "qwen3") == ""
    assert float16_rules.model_fault(configuration(model__dtype="bfloat16"), "gemma2") == ""
