"""Packed log-probs and gradients of four processes, alone and with their tokens split, for the same rows.

    python -m torch.distributed.run --nproc_per_node 4 tests/smoke/sequence_worker.py OUT

The first process writes to OUT, per size of the groups, log-probs, entropies and gradients, averaged over processes as
DDP does. Alone, processes 0 and 2 have the first rows, 1 and 3 the others; in groups of 2 each group has one of
them, in a group of 4 all have the first. "first": alone, all with the first rows.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from kit.policy.packed import sequence_parallel
from kit.policy.packed.attention import use_packed_attention
from kit.policy.packed.packing import make_pack, pack_logps

COMPLETIONS = 7  # columns of the longest completion


def rows(group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (6, 12) of six rows: four after one prompt, two after others; one completion is empty."""
    draw = torch.Generator().manual_seed(group)
    ids = torch.randint(3, 60, (6, 12), generator=draw)
    ids[:4, :5] = ids[0, :5]
    mask = torch.ones_like(ids)
    mask[4:, :2] = 0
    for row, length in enumerate((7, 3, 5, 1, 6, 0)):
        mask[row, 5 + length :] = 0
    return ids, mask


def measure(size: int, kinds: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    facts = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**facts, num_attention_heads=4, num_key_value_heads=2))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    use_packed_attention(model, is_split=True)
    model.gradient_checkpointing_enable()
    model.train()
    group = sequence_parallel.start(size)
    ids, mask = rows(dist.get_rank() // size % kinds)
    trainer = SimpleNamespace(accelerator=Accelerator())
    pack = make_pack(trainer, model, ids, mask, COMPLETIONS, True, group=group)
    logps, entropies = pack_logps(trainer, model, pack, True, group=group)
    weights = torch.linspace(1, 2, COMPLETIONS)
    (logps * weights).sum().backward()
    found = {"logps": logps.detach(), "entropies": entropies.detach()}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        if name.endswith(("q_proj.weight", "k_proj.weight", "down_proj.weight")):
            found[name] = parameter.grad / dist.get_world_size()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    found = {size: measure(size, kinds=2) for size in (1, 2, 4)} | {"first": measure(1, kinds=1)}
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    dist.barrier()


if __name__ == "__main__":
    main()
