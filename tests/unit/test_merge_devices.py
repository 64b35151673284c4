"""A checkpoint that one GPU cannot hold goes over all of them, layer by layer, or is refused with the sizes."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kit.core.errors import BadInput
from merge import devices
from merge.devices import placement

CARD = torch.device("cuda", 0)
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 16}


def empty(layers: int = 8, tied: bool = False) -> torch.nn.Module:
    with torch.device("meta"):
        config = Qwen3Config(**SIZES, num_key_value_heads=2, num_hidden_layers=layers, tie_word_embeddings=tied)
        return Qwen3ForCausalLM(config)


def bytes_of(model: torch.nn.Module, place: dict, dtype: torch.dtype) -> dict:
    """Bytes that a place map puts on each device; every parameter lies on exactly one."""
    found: dict = {}
    for name, one in model.named_parameters():
        (where,) = {device for prefix, device in place.items() if name == prefix or name.startswith(f"{prefix}.")}
        found[where] = found.get(where, 0) + one.numel() * dtype.itemsize
    return found


@pytest.fixture
def machine(monkeypatch):
    """Set the free bytes of each GPU and the GiB of host memory."""

    def machine(*free: int, host: float = 0.0) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(devices, "free_bytes", lambda index: free[index])
        monkeypatch.setattr(devices, "available_gib", lambda: host)

    return machine


def total(model: torch.nn.Module) -> int:
    return sum(one.numel() for one in model.parameters()) * 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_that_one_gpu_holds_stays_on_it(machine, tied):
    model = empty(tied=tied)
    machine(int(total(model) / devices.ROOM) + 1, 10**12)
    assert placement(model, CARD, torch.bfloat16, True, "x") == {"": CARD}
    machine(int(total(model) / devices.ROOM) - 1, 10**12)
    assert placement(model, CARD, torch.bfloat16, True, "x") != {"": CARD}
    assert placement(model, torch.device("cpu"), torch.bfloat16, True, "x") == {"": torch.device("cpu")}


@pytest.mark.parametrize("tied", [True, False])
def test_layers_go_over_all_gpus_in_their_order_and_none_gets_more_than_it_has(machine, tied):
    model = empty(tied=tied)
    free = int(total(model) * 0.75)
    machine(free, free)
    place = placement(model, CARD, torch.bfloat16, False, "x")
    found = bytes_of(model, place, torch.bfloat16)
    assert set(found) == {0, 1} and max(found.values()) <= devices.ROOM * free
    layers = [device for name, device in place.items() if ".layers." in name]
    assert layers == sorted(layers) and len(layers) == 8, "a layer is whole"


def test_plain_weights_may_lie_in_the_hosts_memory_and_weights_that_are_made_may_not(machine):
    model = empty()
    free = int(total(model) * 0.5)
    machine(free, host=1.0)
    found = bytes_of(model, placement(model, CARD, torch.bfloat16, True, "x"), torch.bfloat16)
    assert set(found) == {0, "cpu"} and found[0] <= devices.ROOM * free
    with pytest.raises(
        BadInput, match=r"^runs/fp8 takes 0\.0 GiB in bfloat16; of 1 GPUs, 0\.0 GiB are free for weights\. "
    ):
        placement(model, CARD, torch.bfloat16, False, "runs/fp8")
    machine(free, host=total(model) / 4 / 2**30)
    with pytest.raises(BadInput, match=r"free for weights and the host 0\.0 GiB\. Free them"):
        placement(model, CARD, torch.bfloat16, True, "x")
