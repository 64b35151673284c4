"""A trainer process takes what it may of its GPU, in segments that later steps can use too."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.policy.gpu_memory import ALLOCATOR_VARIABLES, limit_gpu_memory, use_expandable_segments
from kit.train.setup import check_shared_card, started


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("variable", [None, *ALLOCATOR_VARIABLES])
def test_segments_can_grow_unless_the_environment_says_what_is_wanted(monkeypatch, has_gpu, variable):
    settings = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)  # raises when torch moves it
    use_expandable_segments()
    assert settings == ["expandable_segments:True"] * (has_gpu and variable is None)


class Card:
    total_memory = 24 * 2**30


def test_the_memory_limit_is_a_share_of_the_card(monkeypatch):
    shares = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *pair: shares.append(pair))
    config = configuration()
    limit_gpu_memory(config)
    config.train.max_gpu_gib = 18.0
    limit_gpu_memory(config)
    assert shares == [(0.75, 0)]
    config.train.max_gpu_gib = 25.0
    with pytest.raises(BadInput, match=r"train\.max_gpu_gib \(25\) is above the 24\.0 GiB of the card"):
        limit_gpu_memory(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_memory_limit_without_a_gpu_is_refused():
    config = configuration()
    config.train.max_gpu_gib = 18.0
    with pytest.raises(BadInput, match="there is no GPU"):
        limit_gpu_memory(config)


def test_a_card_that_trainer_and_replica_do_not_fit_is_refused(monkeypatch):
    config, facts = configuration(), Qwen3Config()
    config.rollout.backend, config.train.max_gpu_gib, config.server.kv_cache_gib = "server", 18.0, 5.0
    check_shared_card(config, facts)  # without a GPU there is nothing to compare with
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, Card.total_memory))
    asked = []
    monkeypatch.setattr("kit.plan.replica.replica_gib", lambda *given: asked.append(given) or 7.5)
    with pytest.raises(BadInput, match=r"max_gpu_gib \(18\) and server\.kv_cache_gib \(5\).*7\.5 GiB.*24\.0 GiB"):
        check_shared_card(config, facts)
    assert asked == [(config, facts.to_dict())]
    config.train.max_gpu_gib = 16.5
    check_shared_card(config, facts)


def test_segments_are_asked_for_before_a_run_allocates_anything(monkeypatch, tmp_path):
    calls = []
    for name in ("gpu_memory.use_expandable_segments", "layer_kernels.check_gpu", "gpu_memory.limit_gpu_memory"):
        monkeypatch.setattr(f"kit.policy.{name}", lambda *given, name=name: calls.append(name))
    with started(configuration(), RunDir(tmp_path), 1):
        assert calls[0] == "gpu_memory.use_expandable_segments" and len(calls) == 3


def configuration() -> Config:
    return load_config(Path(__file__).parents[2] / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml")
