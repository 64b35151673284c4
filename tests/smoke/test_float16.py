"""`model.dtype: float16`: how far it is from float32 beside bfloat16, its loss scale, resume, the server's base."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from kit.policy.load import load_policy_base
from kit.rollout.policy_view import Rollouts
from kit.train import trainer as trainer_module
from kit.train.loss_scale import use_float16
from kit.weights.frozen_base import dequantize, stored_linears
from kit.weights.write_base import Original
from merge.export import export
from tests.unit.test_update import by_length, rows_of, serve, update

HALF = {"model.dtype": "float16", "train.save_steps": 1, "train.max_steps": 3}
OVERFLOWING = {"scale": 2.0**40, "backoff_factor": 2.0**-24}  # the first step overflows, the second has the usual 2^16


@pytest.fixture(scope="module")
def trainer_in(build_trainer, recipe_arguments, tiny_model_dir, tmp_path_factory):
    """`trainer_in(dtype, {key: value})`: a trainer with a sampler and an adapter that changes what the base says."""

    def build(dtype: str, changes: dict | None = None):
        keys = {"model.dtype": dtype, "rollout.max_sampler_k3": 1e6, **(changes or {})}
        folder = tmp_path_factory.mktemp("half") / "run"
        return serve(build_trainer(recipe_arguments(tiny_model_dir, folder, keys), rewards=[by_length]))

    return build


def measured(trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a step's completions, and its gradient without the loss scale."""
    _, gradient, _ = update(trainer)
    logps = torch.cat([one["old_per_token_logps"][one["completion_mask"].bool()] for one in trainer._buffered_inputs])
    assert logps.dtype == torch.float32 and rows_of(trainer) == 16
    scaler = trainer.accelerator.scaler
    return logps, gradient / (scaler.get_scale() if scaler else 1.0)


def test_float16_is_nearer_to_float32_than_bfloat16_in_log_probs_and_gradient(trainer_in):
    (exact, by), *others = (measured(trainer_in(dtype)) for dtype in ("float32", "float16", "bfloat16"))
    for name, (logps, gradient) in zip(("float16", "bfloat16"), others, strict=True):  # the table of recipes/README.md
        away, cosine = (logps - exact).abs(), torch.cosine_similarity(by, gradient, dim=0)
        print(f"{name}: mean |dlogp| {away.mean():.4f}, largest {away.max():.4f}, 1 - cosine {1 - cosine:.0e}")
    (half, other) = ((logps - exact).abs().mean() for logps, _ in others)
    assert half < 2e-3 and half < 0.3 * other, (half, other)
    (half, other) = (1 - torch.cosine_similarity(by, gradient, dim=0) for _, gradient in others)
    assert half < 1e-3 and half < 0.3 * other, (half, other)
    assert torch.linalg.vector_norm(others[0][1]) == pytest.approx(torch.linalg.vector_norm(by).item(), rel=1e-2)


@pytest.mark.parametrize("changes", [{"policy.compute": "fused"}, {"train.recompute": "selective"}])
def test_fused_layers_and_selective_recomputation_are_as_near(trainer_in, changes):
    (exact, by), (half, gradient) = (measured(trainer_in(dtype, changes)) for dtype in ("float32", "float16"))
    assert (half - exact).abs().mean() < 2e-3 and torch.cosine_similarity(by, gradient, dim=0) > 0.999


def test_micro_batches_add_up_to_the_same_gradient_under_the_scale(trainer_in):
    parts = {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 4}
    packs = parts | {"train.micro_batch_tokens": 88}
    (_, whole), (_, summed), (_, packed) = (measured(trainer_in("float16", keys)) for keys in ({}, parts, packs))
    for one in (summed, packed):
        assert torch.cosine_similarity(whole, one, dim=0) > 0.999
        assert torch.linalg.vector_norm(one) == pytest.approx(torch.linalg.vector_norm(whole).item(), rel=1e-2)


@pytest.fixture(scope="module")
def overflowed(tmp_path_factory, recipe, recipe_arguments, learning_model_dir):
    """Three steps of the recipe's command line, the first with a loss scale that overflows; and a copy of the run that
    resumed after two of them."""
    whole, resumed = (tmp_path_factory.mktemp("scale") / name for name in ("whole", "resumed"))

    def start(accelerator) -> None:
        use_float16(accelerator)
        accelerator.scaler.load_state_dict(accelerator.scaler.state_dict() | OVERFLOWING)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "use_float16", start)
        done = recipe(recipe_arguments(learning_model_dir, whole, HALF))
    assert done.code == 0, done.err
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step-000003")
    done = recipe(recipe_arguments(learning_model_dir, resumed, HALF, ("--resume",)))
    assert done.code == 0, done.err
    return RunDir(whole), RunDir(resumed)


def weights(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.adapter_dir(step) / "adapter_model.safetensors")


def test_an_overflow_skips_the_update_and_is_counted(overflowed, read_jsonl):
    run, _ = overflowed
    rows = read_jsonl(run.metrics_file)
    assert [(row["loss_scale"], row["update_skipped"]) for row in rows] == [(2.0**40, 1), (65536, 0), (65536, 0)]
    assert rows[0]["grad_norm"] is None and all(0 < row["grad_norm"] < 10 for row in rows[1:])  # of the loss, unscaled
    assert not any(one.any() for name, one in weights(run, 1).items() if "lora_B" in name)
    assert any(one.any() for name, one in weights(run, 2).items() if "lora_B" in name)
    log = (run.logs / "trainer.log").read_text()
    assert (
        log.count("step 1: the gradient overflowed float16 at a loss scale of 1.09951e+12. The update is skipped") == 1
    )


def test_a_resume_restores_the_scale_and_repeats_the_run_bit_for_bit(overflowed, read_jsonl):
    run, resumed = overflowed
    assert [row["loss_scale"] for row in read_jsonl(resumed.metrics_file)] == [2.0**40, 65536, 65536]
    expected = weights(run, 3)
    assert all(torch.equal(one, expected[name]) for name, one in weights(resumed, 3).items())


def test_a_forward_that_overflows_ends_the_run_at_once(trainer_in):
    trainer = trainer_in("float16", {"train.max_steps": 2})
    trainer.sampler.generate = lambda policy, prompts, group=None: Rollouts([[7, 8]] * len(prompts), None, 0)
    with torch.no_grad():
        trainer.model.get_base_model().model.norm.weight.fill_(6e4)
    with pytest.raises(CheckFailed, match=r"step 1: loss not finite.* activations above 65,504 overflow"):
        trainer.train_run(resume=False)


def test_the_base_of_a_server_is_what_the_trainer_dequantizes(trainer_in, tmp_path):
    config = trainer_in("float16").config
    export(Original(config.model.source, "float16", True), tmp_path / "base", {"model": "x", "revision": None}, None)
    written, model = load_file(tmp_path / "base" / "model.safetensors"), load_policy_base(config)
    assert {one.dtype for one in written.values()} == {torch.float16}
    for name in stored_linears(model):
        assert torch.equal(written[f"{name}.weight"], dequantize(model.get_submodule(name)))
