"""Two trainer processes (gloo, CPU): one run directory, groups split between them; and the base split between them."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from kit.core.config.recipe import DISTILLATION, PLAIN, QUANTIZED, SUPERVISED
from kit.core.run_directory import RunDir, read_manifest
from kit.core.tokenizer_hash import tokenizer_hash
from kit.policy.load import load_adapter_weights
from kit.rollout.canary import read_canary
from kit.rollout.canary_scores import CanaryScorer
from kit.rollout.protocol import decode_ids, encode_floats, encode_ids
from kit.weights.frozen_base import hash_base, load_frozen, load_nf4
from merge.__main__ import main
from tests import processes
from tests.conftest import ROOT
from tests.unit.fake_replica import FakeReplica
from tests.unit.test_accelerate_configs import announces
from tests.unit.test_overlap import boxing_replica


def rows(run: RunDir, name: str) -> list[dict]:
    return [json.loads(line) for line in (run.path / name).read_text().splitlines()]


def launch(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *arguments]
    return processes.run(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment})


def train(arguments: list[str]) -> subprocess.CompletedProcess:
    return launch(["recipes/grpo_qlora.py", *arguments], ACCELERATE_USE_CPU="true")


ONE_STEP = ["stage", "activate", "score", *["generate"] * 4]  # what is asked of a replica
# 8 completions on each process: two groups of 4.
KEYS = {"train.per_device_train_batch_size": 8, "train.max_steps": 2}
# The same 8 in micro-batches of tokens; a completion with its prompt may have 88.
IN_PACKS = {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 2}
IN_PACKS |= {"train.micro_batch_tokens": 96}
PACKED = {**KEYS, **IN_PACKS}
# Packs of both processes, whose tokens they split; half of a completion with its prompt fits into a process.
SEQUENCES = {**PACKED, "train.micro_batch_tokens": 44, "train.sequence_parallel": 2, "policy.kernels": "fused"}
# So cold that one process and two sample the same completions of a step's prompts.
DISTILLED = {"distill.teacher": "base", "policy.quant_cfg": "nvfp4a16", "train.max_steps": 2}
DISTILLED |= {"rollout.temperature": 1e-4, "train.learning_rate": 1e-4}
FINE_TUNED = {"sft.rows": "prompt_completion", "train.max_steps": 2, "train.per_device_train_batch_size": 8}
# Two groups on each process; a step is divided by its tokens, of which the first groups' batch has only some.
BOXED = {**PACKED, "train.loss_type": "dapo", "train.beta": 0.05, "reward.functions": "[boxed_format]"}
BOXED |= {"reward.options": "{}"}
STREAMED = {"rollout.stream_groups": 1}
ON_A_CPU = {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}  # DDP then asks for no GPU of the worker's pretended ones


@pytest.fixture(scope="module")
def untied(tmp_path_factory, learning_model_dir) -> Path:
    """The learning model with an output matrix of its own, as models of some size have."""
    folder = shutil.copytree(learning_model_dir, tmp_path_factory.mktemp("untied") / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"tie_word_embeddings": False}))
    return folder


def demonstrations(model: Path, folder: Path) -> Path:
    """The problems of a model as prompts with completions."""
    problems = [json.loads(line) for line in (model / "train.jsonl").read_text().splitlines()]
    pairs = [{"prompt": one["question"], "completion": f" {one['answer']}"} for one in problems]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder / "demonstrations.jsonl"


def fake_replica(model: Path) -> FakeReplica:
    """A stand-in for a replica of a model; what it samples of a prompt is the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    base = hash_base(load_nf4(model, dtype="float32", double_quantization=True, device="cpu"))
    found = FakeReplica(base_hash=base["hash"], tokenizer_hash=tokenizer_hash(tokenizer), vocab_size=len(tokenizer))

    def echo(body: dict) -> dict:
        ids = decode_ids(body["token_ids"])[-24:]
        sample = {"token_ids": encode_ids(ids), "logprobs": encode_floats([-5.0] * len(ids)), "finish_reason": "stop"}
        return {"version": body["version"], "samples": [sample] * body["n"]}

    found.before["generate"] = echo
    return found


@pytest.fixture
def replica(tiny_model_dir):
    found = fake_replica(tiny_model_dir)
    yield found
    found.stop()


def server_keys(replica: FakeReplica) -> dict:
    # The stand-in's log-probs are not the model's.
    keys = {"rollout.backend": "server", "rollout.server_urls": f"['{replica.url}']", "rollout.max_sampler_k3": 1e6}
    keys |= {"rollout.max_canary_delta": 1e6, "server.base": "/none", "rollout.server_wait_s": 20}
    return {**keys, "train.per_device_train_batch_size": 8, "train.max_steps": 2, "watch.completions_every": 1}


def test_two_processes_use_two_replicas_and_a_failed_sync_of_one_ends_both(
    tmp_path, recipe_arguments, tiny_model_dir, replica, request
):
    run = RunDir(tmp_path / "run")
    other = fake_replica(tiny_model_dir)
    request.addfinalizer(other.stop)
    other.before["activate"] = lambda body: other.refuses.update(stage=(422, "no room for it"))
    keys = server_keys(replica) | {"rollout.server_urls": f"['{replica.url}', '{other.url}']"}
    done = train(recipe_arguments(tiny_model_dir, run.path, keys))
    assert done.returncode != 0
    (row,) = rows(run, "metrics.jsonl")
    assert row["step"] == 1 and row["completion_tokens"] == 16 * 24
    assert [one.calls.count("generate") for one in (replica, other)] == [2, 2], "half of the four groups each"
    assert f"the replica at {other.url} did not load adapter version 1: 422 no room for it" in done.stderr
    assert done.stderr.count("error: the replica at") == 1, "said once"


def test_a_process_waits_for_rollouts_in_a_group_of_its_own_and_hears_of_their_failure(tmp_path):
    """The default group gives up after six seconds, the main process works for eight."""
    done = launch(["tests/smoke/waiting_worker.py", str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    assert found == [f"FOUND {rank} gloo True done the replica is gone" for rank in (0, 1)]


def test_replicas_that_cannot_be_woken_end_both_processes(tmp_path, recipe_arguments, tiny_model_dir, replica):
    run = RunDir(tmp_path / "run")
    replica.info["sleep_enabled"] = True
    replica.refuses["wake"] = (500, "no memory left on the card")
    keys = server_keys(replica) | {"server.sleep": "true"}
    done = train(recipe_arguments(tiny_model_dir, run.path, keys))
    assert done.returncode != 0
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1], "the first step needs no waking"
    error = f"error: the replica at {replica.url} did not wake up: no memory left on the card."
    assert done.stderr.count(error) == 1, done.stderr[-3000:]
    assert f"{replica.url} may be left asleep: no memory left on the card." in done.stdout


SHARDED = ("fsdp2", "zero3")


@dataclass
class Split:
    """Where the runs of one launch lie, most on a base split in one of two ways; the replicas of the server runs."""

    folder: Path
    replicas: dict[str, FakeReplica]

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / name)

    def notes(self, rank: int) -> dict[str, dict]:
        """Notes of a process at the end of each run, by the run's name."""
        lines = (self.folder / f"rank-{rank}.jsonl").read_text().splitlines()
        return {note["run"]: note for note in map(json.loads, lines)}


@pytest.fixture(scope="module")
def split(tmp_path_factory, recipe_arguments, untied, learning_model_dir, tiny_model_dir) -> Split:
    """Start all runs in one launch, first on a whole base: two steps (`ddp`), the same resumed after one, a quantized
    distillation, a run with `ddp`'s adapter as start and reference, a supervised one, packs with sequence parallelism,
    micro-batches, these with FP8 products or fused adapters, quantization-aware GRPO, and some with servers. Then all
    of them on a base split in either way, the distillation and the supervised run in micro-batches, and one step on an
    unquantized base. Last ZeRO-2: micro-batches, quantization-aware GRPO, and the distillation in micro-batches."""
    folder, plan = tmp_path_factory.mktemp("split"), []
    keys = {**KEYS, "train.save_steps": 1}
    replicas = {kind: fake_replica(untied) for kind in SHARDED} | {"overlapped": fake_replica(tiny_model_dir)}
    replicas["boxed"] = boxing_replica(learning_model_dir)

    def add(name: str, model: Path, changes: dict, environment: dict, file: str = PLAIN, resumed: str = "") -> None:
        run = {"name": name, "recipe": file.removesuffix(".py").replace("/", "."), "environment": environment}
        if resumed:
            run["copy"] = [str(folder / resumed), str(folder / name)]
            run["remove"] = str(folder / name / "checkpoints" / "step-000002")
        flags = ("--resume",) if resumed else ()
        plan.append({**run, "arguments": recipe_arguments(model, folder / name, changes, flags)})

    # First those on a whole base, before anything announces that the base is to be split.
    add("ddp", untied, keys, ON_A_CPU)
    add("ddp-resumed", untied, keys, ON_A_CPU, resumed="ddp")
    add("distilled", learning_model_dir, DISTILLED | {"train.per_device_train_batch_size": 8}, ON_A_CPU, DISTILLATION)
    started = {"policy.init_adapter": folder / "ddp/adapters/v000002", "policy.reference": "init_adapter"}
    add("started", untied, keys | started, ON_A_CPU)
    taught = FINE_TUNED | {"data.path": demonstrations(untied, folder)}
    add("fine-tuned", untied, taught, ON_A_CPU, SUPERVISED)
    add("sequences", untied, SEQUENCES, ON_A_CPU)
    add("packed", untied, PACKED, ON_A_CPU)
    fp8 = {**PACKED, "policy.compute": "fp8", "train.share_prompts": "true"}
    quantized = {**keys, "policy.quant_cfg": "w4a16"}
    fused = {**PACKED, "policy.compute": "fused", "policy.kernels": "fused", "policy.fused_mlp": "true"}
    fused["train.keep_logits"] = "true"
    add("fp8", untied, {**fp8, "train.keep_weights": "true"}, ON_A_CPU)
    add("fused", untied, fused, ON_A_CPU)
    add("quantized", untied, quantized, ON_A_CPU, QUANTIZED)
    overlap = {"rollout.overlap": "true", "train.max_steps": 3}
    add("overlapped", tiny_model_dir, server_keys(replicas["overlapped"]) | overlap, ON_A_CPU)
    boxed = {**server_keys(replicas["boxed"]), **BOXED}
    add("boxed", learning_model_dir, boxed, ON_A_CPU)
    add("streamed", learning_model_dir, boxed | STREAMED, ON_A_CPU)
    for kind in SHARDED:
        # All that either announces, so that the second one takes the place of the first.
        environment = {"ACCELERATE_USE_FSDP": "false"} | announces(ROOT / f"accelerate_configs/{kind}.yaml")
        environment["ACCELERATE_MIXED_PRECISION"] = "no"  # the small model computes in float32
        server = {**keys, **server_keys(replicas[kind]), "policy.init_adapter": folder / "ddp/adapters/v000002"}
        add(kind, untied, keys, environment)
        add(f"{kind}-resumed", untied, keys, environment, resumed=kind)
        add(f"{kind}-served", untied, server, environment)
        unquantized = {**keys, "policy.quantization": "none", "train.max_steps": 1}
        add(f"{kind}-unquantized", untied, unquantized, environment)
        add(f"{kind}-sequences", untied, SEQUENCES, environment)
        add(f"{kind}-packed", untied, PACKED, environment)
        add(f"{kind}-fp8", untied, fp8 | {"train.recompute": "full"}, environment)
        add(f"{kind}-fused", untied, fused, environment)
        if kind == "fsdp2":
            add("fsdp2-streamed", learning_model_dir, boxed | STREAMED, environment)
        add(f"{kind}-quantized", untied, quantized, environment, QUANTIZED)
        add(f"{kind}-distilled", learning_model_dir, DISTILLED | IN_PACKS, environment, DISTILLATION)
        add(f"{kind}-started", untied, keys | started, environment)
        add(f"{kind}-fine-tuned", untied, taught | IN_PACKS, environment, SUPERVISED)
    environment = {"ACCELERATE_USE_FSDP": "false"} | announces(ROOT / "accelerate_configs/zero2.yaml")
    environment["ACCELERATE_MIXED_PRECISION"] = "no"
    add("zero2-packed", untied, PACKED, environment)
    add("zero2-quantized", untied, quantized, environment, QUANTIZED)
    add("zero2-distilled", learning_model_dir, DISTILLED | IN_PACKS, environment, DISTILLATION)
    (folder / "plan.json").write_text(json.dumps(plan))
    try:
        done = launch(["tests/smoke/sharded_worker.py", str(folder / "plan.json")])
    finally:
        for replica in replicas.values():
            replica.stop()
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    supervised = sum("fine-tuned" in run["name"] for run in plan)
    counts = ("base unchanged", 0), ("training problems:", supervised), ("training rows:", len(plan) - supervised)
    for said, fewer in counts:
        assert done.stdout.count(said) == len(plan) - fewer, "each run says it once, not each process"
    return Split(folder, replicas)


def adapter(run: RunDir, version: str) -> dict[str, torch.Tensor]:
    return load_file(run.adapters / version / "adapter_model.safetensors")


def figures(run: RunDir, *keys: str) -> dict[str, list]:
    return {key: [row[key] for row in rows(run, "metrics.jsonl")] for key in keys}


def assert_equal_figures(run: RunDir, whole: RunDir, keys: tuple[str, ...], rel: float = 1e-4, least: float = 1e-7):
    """Compare `keys` of metrics.jsonl, to a relative `rel` or an absolute `least`, and the ledgers."""
    for key, expected in figures(whole, *keys).items():
        assert figures(run, key)[key] == pytest.approx(expected, rel=rel, abs=least), key
    assert (run.path / "ledger.jsonl").read_text() == (whole.path / "ledger.jsonl").read_text()


def assert_equal_adapters(run: RunDir, whole: RunDir):
    """Compare the adapters of step 2, to a thousandth of the largest weight that was learned."""
    found, expected = (adapter(one, "v000002") for one in (run, whole))
    assert found.keys() == expected.keys()
    largest = max(tensor.abs().max() for name, tensor in expected.items() if "lora_B" in name)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert (found[name] - tensor).abs().max() < 1e-3 * largest, name


def test_two_processes_write_one_run(split):
    run = split.run("ddp")
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1, 2]
    assert json.loads(run.config_file.read_text())["processes"] == 2
    # Sixteen completions of both processes: four groups of four.
    assert all(len(row["problem_ids"]) == 4 for row in rows(run, "ledger.jsonl"))
    sampled = rows(run, "completions/step-000002.jsonl")
    assert len(sampled) == 16 and len({row["problem_id"] for row in sampled}) == 4
    assert run.newest_adapter().name == "v000002"


@pytest.mark.parametrize("kind", ["ddp", *SHARDED])
def test_a_resume_by_two_processes_repeats_the_uninterrupted_run(split, kind):
    whole, resumed = split.run(kind), split.run(f"{kind}-resumed")
    assert "resuming from" in (resumed.path / "logs/trainer.log").read_text()
    compared = ("reward", "kl", "grad_norm", "loss")
    assert figures(resumed, *compared) == figures(whole, *compared)
    expected = adapter(whole, "v000002")
    for name, tensor in adapter(resumed, "v000002").items():
        assert torch.equal(tensor, expected[name]), name


def test_a_quantized_distillation_by_two_processes_is_that_of_one(
    split, tmp_path, recipe, recipe_arguments, learning_model_dir
):
    one, two = RunDir(tmp_path / "one"), split.run("distilled")
    alone = recipe_arguments(learning_model_dir, one.path, DISTILLED | {"train.per_device_train_batch_size": 16})
    assert recipe(alone, DISTILLATION).code == 0
    assert json.loads(two.config_file.read_text())["processes"] == 2
    for key, expected in figures(one, "divergence", "grad_norm", "entropy").items():
        assert min(expected) > 0 and figures(two, key)[key] == pytest.approx(expected, rel=1e-4), key


def test_the_adapter_that_two_processes_start_from_is_their_reference(split):
    """The KL to it is 0 in step 1; that of the same start to the base is not."""
    started, served = figures(split.run("started"), "kl"), figures(split.run("fsdp2-served"), "kl")
    assert started["kl"][0] == 0.0 < started["kl"][1] and served["kl"][0] > 0


def test_two_processes_fine_tune_on_the_rows_that_one_process_takes(split, tmp_path, recipe, recipe_arguments, untied):
    one, two = RunDir(tmp_path / "one"), split.run("fine-tuned")
    whole = {"data.path": demonstrations(untied, tmp_path), "train.per_device_train_batch_size": 16}
    done = recipe(recipe_arguments(untied, one.path, FINE_TUNED | whole), SUPERVISED)
    assert done.code == 0, done.err
    for alone, together in zip(rows(one, "ledger.jsonl"), rows(two, "ledger.jsonl"), strict=True):
        assert sorted(alone["problem_ids"]) == sorted(together["problem_ids"]) and len(alone["problem_ids"]) == 16
    for key, expected in figures(one, "loss", "grad_norm").items():
        assert min(expected) > 0 and figures(two, key)[key] == pytest.approx(expected, rel=1e-4), key


def test_two_processes_share_every_sync_and_get_the_completions_of_their_own_prompts(split):
    """The first step waits for its rollouts, the others take what was generated behind the update before."""
    run = split.run("overlapped")
    generate, sync = ["generate"] * 4, ["stage", "activate", "score"]
    calls = [call for call in split.replicas["overlapped"].calls if call not in ("info", "discard")]
    assert calls == [*sync, *generate, *generate, *sync, *generate, *sync]
    metrics = rows(run, "metrics.jsonl")
    assert [(row["adapter_version"], row["policy_lag"]) for row in metrics] == [(0, 0), (0, 1), (1, 1)]
    for row in metrics:
        sampled = rows(run, f"completions/step-{row['step']:06d}.jsonl")
        assert len(sampled) == 16 and {line["adapter_version"] for line in sampled} == {row["adapter_version"]}
        for line in sampled:
            question = line["prompt"][-12:].replace(" ", "")
            assert question in line["completion"].replace(" ", ""), (line["prompt"], line["completion"])
    assert metrics[0]["sampler_nan_count"] == 0 and metrics[0]["sampler_k3"] > 0
    assert metrics[1]["sync_seconds"]["stage"] > 0


@pytest.mark.parametrize("kind", SHARDED)
def test_a_split_base_learns_what_ddp_learns(split, kind):
    whole, run = split.run("ddp"), split.run(kind)
    assert_equal_figures(run, whole, ("reward", "kl", "grad_norm", "loss"), rel=1e-3, least=1e-6)
    assert_equal_adapters(run, whole)


def test_each_process_holds_half_of_the_base_that_one_process_has(split, untied):
    base = hash_base(model := load_nf4(untied, dtype="float32", device="cpu"))
    for kind in SHARDED:
        facts = json.loads(split.run(kind).base_file.read_text())
        assert facts == json.loads(split.run("ddp").base_file.read_text()) and facts["hash"] == base["hash"]
    total = sum(parameter.nbytes for parameter in model.parameters())
    for rank in (0, 1):
        notes = split.notes(rank)
        assert notes["packed"]["bytes"] == total
        for kind in SHARDED:
            for run in (
                "",
                "-resumed",
                "-served",
                "-sequences",
                "-packed",
                "-fp8",
                "-quantized",
                "-started",
                "-fine-tuned",
            ):
                note = notes[kind + run]
                assert note["hash"] == base["hash"] and 0.45 * total < note["bytes"] < 0.55 * total, kind + run


def test_zero3_holds_one_gathered_layer_at_a_time(split):
    for rank in (0, 1):
        for name, note in split.notes(rank).items():
            if name.startswith("zero3"):
                assert note["layers"] and set(note["layers"]) == {1}, name


def test_an_unquantized_base_is_split_too(split, untied):
    base = hash_base(model := load_frozen(untied, "none", "float32", device="cpu"))
    total = sum(parameter.nbytes for parameter in model.parameters())
    for kind in SHARDED:
        assert json.loads(split.run(f"{kind}-unquantized").base_file.read_text())["hash"] == base["hash"]
        for rank in (0, 1):
            note = split.notes(rank)[f"{kind}-unquantized"]
            assert note["hash"] == base["hash"] and 0.45 * total < note["bytes"] < 0.55 * total
    first, second = (rows(split.run(f"{kind}-unquantized"), "metrics.jsonl")[0] for kind in SHARDED)
    for key in ("reward", "grad_norm", "loss"):
        assert first[key] == pytest.approx(second[key], rel=1e-3, abs=1e-6), key
    assert first["grad_norm"] > 0


@pytest.mark.parametrize("name", ["packed", "fsdp2-packed", "zero3-packed", "zero2-packed"])
def test_processes_with_different_numbers_of_micro_batches_learn_what_padded_batches_teach(split, name):
    """Under FSDP2 and DeepSpeed the process with fewer adds idle ones."""
    keys = ("reward", "kl", "entropy", "clip_fraction", "grad_norm", "loss")
    assert_equal_figures(split.run(name), split.run("ddp"), keys)
    first, second = (split.notes(rank)[name]["micro_batches"][-2:] for rank in (0, 1))
    assert second == [8, 8] and len(first) == 2 and 1 < min(first) <= max(first) < 8


@pytest.mark.parametrize("name", ["sequences", "fsdp2-sequences", "zero3-sequences"])
def test_processes_that_split_the_tokens_of_packs_learn_what_whole_rows_teach(split, name):
    keys = ("reward", "kl", "entropy", "clip_fraction", "grad_norm", "loss", "completion_tokens")
    assert_equal_figures(split.run(name), split.run("ddp"), keys)
    first, second = (split.notes(rank)[name]["micro_batches"][-2:] for rank in (0, 1))
    assert first == second and min(first) > 1


@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fp8", ("reward", "kl", "entropy", "grad_norm", "loss")),
        ("fused", ("reward", "kl", "entropy", "grad_norm", "loss")),
        ("quantized", ("reward", "kl", "entropy", "grad_norm", "loss")),
        ("started", ("reward", "kl", "grad_norm", "loss")),
        ("fine-tuned", ("loss", "grad_norm")),
        ("distilled", ("divergence", "entropy", "grad_norm")),
    ],
)
def test_every_lever_on_a_split_base_computes_what_it_computes_on_a_whole_one(split, kind, name, keys):
    """FP8 products in packs with shared prompts (on a whole base from kept codes), fused adapters and MLPs with kept
    logits, quantization-aware GRPO, a reference that the run started from, fine-tuning, and a quantized
    distillation."""
    whole, run = split.run(name), split.run(f"{kind}-{name}")
    assert_equal_figures(run, whole, keys)
    assert_equal_adapters(run, whole)


def test_fused_adapters_and_mlps_with_kept_logits_learn_what_peft_s_path_learns(split):
    whole, run = split.run("packed"), split.run("fused")
    assert_equal_figures(run, whole, ("reward", "kl", "entropy", "grad_norm", "loss"))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("quantized", ("reward", "kl", "entropy", "grad_norm", "loss")),
        ("distilled", ("divergence", "entropy", "grad_norm")),
    ],
)
def test_quantized_training_under_zero2_is_that_of_ddp(split, name, keys):
    whole, run = split.run(name), split.run(f"zero2-{name}")
    assert_equal_figures(run, whole, keys)
    assert_equal_adapters(run, whole)


@pytest.mark.parametrize("name", ["streamed", "fsdp2-streamed"])
def test_two_processes_that_stream_learn_what_they_learn_from_a_whole_batch(split, name):
    whole, run = split.run("boxed"), split.run(name)
    assert_equal_figures(run, whole, ("reward", "reward_std", "kl", "entropy", "grad_norm", "loss", "sampler_k3"))
    assert_equal_adapters(run, whole)
    assert all(row["grad_norm"] > 0 and row["seconds"]["rollout_hidden"] >= 0 for row in rows(run, "metrics.jsonl"))
    sampled, expected = (rows(one, "completions/step-000002.jsonl") for one in (run, whole))
    assert [row["completion"] for row in sampled] == [row["completion"] for row in expected]
    assert [row["advantage"] for row in sampled] == pytest.approx([row["advantage"] for row in expected])


def test_a_bit_that_changes_in_one_process_is_found_by_all(split):
    for rank in (0, 1):
        for name, note in split.notes(rank).items():
            if name.startswith(SHARDED):
                assert "the frozen base changed" in note["error"], name
                assert "first ['model.layers.0.mlp.down_proj.weight']" in note["error"], name
                assert re.search(r"1 of 2\d tensors", note["error"]), name


@pytest.mark.parametrize("kind", SHARDED)
def test_a_server_gets_the_gathered_adapter_and_the_canary_of_all_processes(
    split, kind, build_trainer, recipe_arguments, untied, tmp_path
):
    run = split.run(f"{kind}-served")
    assert [call for call in split.replicas[kind].calls if call not in ("info", "discard")] == ONE_STEP * 2
    (session,) = [entry for entry in (run.path / "sync").iterdir() if entry.is_dir()]
    canary = read_canary(session / "canary.json")
    assert canary["version"] == 1
    # The same adapter in one process, on the whole base.
    trainer = build_trainer(recipe_arguments(untied, tmp_path / "alone"))
    load_adapter_weights(trainer.model, session / "v000001")
    scorer = CanaryScorer(prompts=2, longest=64)
    scorer.sequences = canary["sequences"]
    alone = scorer.scores(trainer.policy)
    for scores, expected in ((canary["policy"], alone.policy), (canary["base"], alone.base)):
        for one, other in zip(scores, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert max(np.abs(on - off).max() for on, off in zip(canary["policy"], canary["base"], strict=True)) > 1e-4


@pytest.mark.parametrize("kind", SHARDED)
def test_merge_takes_what_a_split_base_trained(split, kind, tmp_path):
    run = RunDir(shutil.copytree(split.run(kind).path, tmp_path / "run"))
    assert main(["--run", str(run.path), "--policy", "grpo", "--format", "bf16"]) == 0
    assert read_manifest(run.merged / "grpo" / "bf16", "checkpoint", deep=True)["retained_update"] > 0.9


def test_episodes_run_in_every_process_and_count_as_one_step(recipe_arguments, tools_model_dir, tmp_path):
    run = RunDir(tmp_path / "run")
    keys = {"environment.factory": "tests.unit.episode_cases:CountingCalculator", "environment.max_turns": 3}
    keys |= {"rollout.max_prompt_length": 100, "rollout.max_completion_length": 64, "watch.completions_every": 1}
    done = train(recipe_arguments(tools_model_dir, run.path, KEYS | keys))
    assert done.returncode == 0, done.stderr
    for row in rows(run, "metrics.jsonl"):
        sampled = rows(run, f"completions/step-{row['step']:06d}.jsonl")
        assert len(sampled) == 16 and row["episode_turns"] == sum(len(one["turn_versions"]) for one in sampled) / 16
        assert row["rewards"]["CountingCalculator"] == pytest.approx(row["tool_calls"])
        # A step's processes have different problems and different turns, and learn from all of them.
        assert len({one["problem_id"] for one in sampled}) == 4
