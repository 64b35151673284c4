"""QeRL's noise on the sampler's norms: its schedule, its draw, where it goes and that it leaves nothing behind."""

import numpy as np
import pytest
import torch

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.config.rollout_rules import noise_faults
from kit.core.errors import BadInput, CheckFailed
from kit.rollout.noise import Noise, NoisyNorms, draw, noise_of, noisy, norms, sigma_at
from tests.conftest import CONFIG

ON = ["--policy.quant_noise_start=1e-2", "--policy.quant_noise_end=1e-4"]


class Decoder(torch.nn.Module):
    """The norms of a Qwen3 by their names, inside of `prefix` modules as peft or vLLM have it."""

    def __init__(self, prefix: tuple[str, ...]):
        super().__init__()
        place = self
        for name in prefix:
            place.add_module(name, torch.nn.Module())
            place = getattr(place, name)
        layer = torch.nn.Module()
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer.add_module(name, torch.nn.RMSNorm(64))
        layer.self_attn = torch.nn.Module()
        layer.self_attn.q_norm = torch.nn.RMSNorm(64)
        place.layers, place.norm = torch.nn.ModuleList([layer]), torch.nn.RMSNorm(64)


def published_schedule(step: int, steps: int, start: float, end: float, stages: int) -> float:
    """What NVlabs/QeRL computes: σ by stage in a list without the first stage, looked up by the interval of a step."""
    trend = start * (end / start) ** (np.arange(stages - 1) / (stages - 2))
    interval = int(step // (steps / (len(trend) + 1)))
    return 0.0 if interval == 0 else float(trend[min(interval - 1, len(trend) - 1)])


@pytest.mark.parametrize(("steps", "stages"), [(200, 10), (80, 10), (30, 3), (100, 4)])
def test_the_schedule_is_the_published_one(steps, stages):
    ours = [sigma_at(step, steps, 1e-2, 1e-4, stages) for step in range(steps + 1)]
    theirs = [published_schedule(step, steps, 1e-2, 1e-4, stages) for step in range(steps + 1)]
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert (ours[0], max(ours), ours[-1]) == (0.0, 1e-2, pytest.approx(1e-4)) and len(set(ours)) == stages


def test_a_run_without_the_keys_has_no_noise_and_one_with_them_has_the_same_at_every_start():
    plain, on = load_config(CONFIG), load_config(CONFIG, [*ON, "--run.seed=1"])
    assert noise_of(plain, 40) is None
    assert noise_of(on, 0).sigma == 0 and noise_of(on, 8).sigma == pytest.approx(1e-2)  # 80 steps in 10 stages
    assert noise_of(on, 40) == noise_of(load_config(CONFIG, [*ON, "--run.seed=1"]), 40)
    assert noise_of(on, 40).seed != noise_of(on, 41).seed != noise_of(load_config(CONFIG, ON), 41).seed


def test_no_two_versions_of_runs_with_neighbouring_seeds_share_a_draw():
    configs = [load_config(CONFIG, [*ON, f"--run.seed={seed}"]) for seed in range(3)]
    seeds = [noise_of(config, version).seed for config in configs for version in range(80)]
    assert len(set(seeds)) == len(seeds)


def test_noise_is_drawn_by_name_so_that_trainer_and_server_have_the_same():
    trainer, server = Decoder(("base_model", "model", "model")), Decoder(("model",))
    names = ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    assert list(norms(trainer)) == list(norms(server)) == names
    noise = Noise(0.01, 7)
    for model in (trainer, server):
        NoisyNorms(model).set(noise)
    first, second = (norms(server)[name].detach() for name in names)
    assert torch.equal(first, norms(trainer)[names[0]]) and not torch.equal(first, second)
    assert (first - 1).std() == pytest.approx(0.01, rel=0.3) and abs((first - 1).mean()) < 0.005
    assert torch.equal(first, 1 + draw(names[0], 64, noise))
    for untouched in (server.model.norm, server.model.layers[0].self_attn.q_norm):
        assert torch.equal(untouched.weight, torch.ones(64))


def test_noise_never_adds_up_and_comes_off_exactly():
    model = Decoder(("model",)).bfloat16()
    held, weights = NoisyNorms(model), norms(model)
    addresses = [weight.data_ptr() for weight in weights.values()]
    for seed in (1, 2, 3):
        held.set(Noise(0.3, seed))
    alone = Decoder(("model",)).bfloat16()
    NoisyNorms(alone).set(Noise(0.3, 3))
    for name, weight in weights.items():
        assert torch.equal(weight, norms(alone)[name])
    held.set(Noise(0.0, 4))
    assert all(torch.equal(weight, torch.ones(64).bfloat16()) for weight in weights.values())
    assert [weight.data_ptr() for weight in weights.values()] == addresses, "a captured graph would read the old ones"


@pytest.mark.parametrize(("sigma", "share"), [(1e-2, 0.77), (1e-3, 0.03), (3e-4, 0.0)])
def test_of_small_noise_a_scale_in_bfloat16_takes_little(sigma, share):
    own, moved = torch.ones(64).bfloat16(), []
    for seed in range(50):
        NoisyNorms(alone := Decoder(("model",)).bfloat16()).set(Noise(sigma, seed))
        moved += [(weight != own).float().mean().item() for weight in norms(alone).values()]
    assert sum(moved) / len(moved) == pytest.approx(share, abs=0.02)


def test_the_trainers_own_norms_are_noisy_inside_the_block_only():
    model = Decoder(("model",))
    with pytest.raises(ZeroDivisionError), noisy(model, Noise(0.1, 1)):
        assert not torch.equal(norms(model)["layers.0.input_layernorm"], torch.ones(64))
        raise ZeroDivisionError
    assert all(torch.equal(weight, torch.ones(64)) for weight in norms(model).values())
    with noisy(model, None):
        assert all(torch.equal(weight, torch.ones(64)) for weight in norms(model).values())


def test_a_model_without_such_norms_is_refused():
    with pytest.raises(CheckFailed, match="no input_layernorm or post_attention_layernorm"):
        norms(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["--policy.quant_noise_start=1e-2"], "1e-2 and 1e-4; 0 and 0 turn it off"),
        (["--policy.quant_noise_end=1e-2"], "must be above 0"),
        (["--policy.quant_noise_start=1e-4", "--policy.quant_noise_end=1e-2"], "the end at most the start"),
        ([*ON, "--policy.quant_noise_stages=1"], "must be 2 or more"),
        ([*ON, "--rollout.backend=server", "--rollout.sync=adapter"], "Set rollout.sync to remerge"),
    ],
)
def test_noise_that_cannot_work_is_refused(keys, reason):
    with pytest.raises(BadInput, match=reason):
        check_config(load_config(CONFIG, keys), 1)


@pytest.mark.parametrize(
    ("backend", "sharding", "refused"),
    [("in_process", "FSDP2", True), ("in_process", None, False), ("server", "ZeRO-3", False)],
)
def test_norms_that_are_split_over_processes_get_no_noise_in_them(backend, sharding, refused):
    found = noise_faults(load_config(CONFIG, [*ON, f"--rollout.backend={backend}"]), sharding)
    assert bool(found) == refused and all("which splits the norms over processes" in one for one in found)


def test_generation_is_noisy_and_the_update_is_not(
    recipe, recipe_arguments, tiny_model_dir, tmp_path, read_jsonl, monkeypatch
):
    from kit.train.trainer import PolicyTrainer
    from kit.train.trl_trainer import GRPOTrainer

    seen: dict[str, list[float]] = {"_generate_single_turn": [], "compute_loss": []}

    def watched(owner: type, name: str):
        original = getattr(owner, name)

        def watch(trainer, *arguments, **keywords):
            scales = norms(trainer.accelerator.unwrap_model(trainer.model)).values()
            seen[name].append(float(torch.stack(list(scales)).std()))
            return original(trainer, *arguments, **keywords)

        return watch

    for owner, name in ((GRPOTrainer, "_generate_single_turn"), (PolicyTrainer, "compute_loss")):
        monkeypatch.setattr(owner, name, watched(owner, name))
    keys = {"policy.quant_noise_start": 0.02, "policy.quant_noise_end": 0.02, "policy.quant_noise_stages": 2}
    keys |= {"train.max_steps": 4, "train.save_steps": 4, "run.seed": 3}
    done = recipe(recipe_arguments(tiny_model_dir, tmp_path / "run", keys))
    assert done.code == 0, done.err
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(row["noise_sigma"], row["noise_seed"]) for row in rows] == [
        (0.0 if version < 2 else 0.02, 3_000_009 + version) for version in range(4)
    ]
    own = seen["compute_loss"][0]
    assert seen["compute_loss"] == [own] * len(seen["compute_loss"])
    assert seen["_generate_single_turn"][:2] == [own] * 2
    assert all(spread == pytest.approx(0.02, rel=0.4) for spread in seen["_generate_single_turn"][2:])
