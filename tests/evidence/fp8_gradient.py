"""How far FP8 products (`policy.compute fp8`) turn the adapter's gradient, on a trained model.

    python tests/evidence/fp8_gradient.py --base models/tiny-base [--rows 64]

The base samples completions of its own training problems; the loss is their log-probs, weighted at random as
advantages are. Gradients of fp8 and of fused are compared with those of plain (peft's path) on the same tokens, the
adapter's B not zero. On a CPU the FP8 products are emulated with the same numbers. A random network says little here:
it amplifies every rounding from layer to layer. Prints one line for each; exit 1 when fp8's cosine is below .9.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LEAST_COSINE, NEW_TOKENS, SPREAD = 0.9, 24, 0.02


def policy(base: Path, compute: str) -> Any:
    """The NF4 base with a fixed random adapter, computing as `compute` says."""
    from peft import LoraConfig, get_peft_model

    from kit.policy.fused_linear import use_fused_linears
    from kit.weights.frozen_base import load_nf4

    model = load_nf4(str(base), dtype="float32", double_quantization=True, device="cpu")
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * SPREAD
    if compute != "plain":
        use_fused_linears(model, compute)
    return model.train()


def sampled(base: Path, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (rows, T) of prompts, cut to the shortest, with completions of the base; and which of ids[:, 1:] are
    a completion's, its stop token included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    problems = [json.loads(line) for line in (base / "train.jsonl").read_text().splitlines()[:rows]]
    chats = [[{"role": "user", "content": problem["question"]}] for problem in problems]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    shortest = min(map(len, prompts))
    ids = torch.tensor([prompt[-shortest:] for prompt in prompts])
    torch.manual_seed(0)
    model = policy(base, "plain")
    ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=True)
    ended = (ids[:, shortest:] == tokenizer.eos_token_id).cumsum(1).roll(1, 1)
    ended[:, 0] = 0
    mask = torch.zeros(ids[:, 1:].shape, dtype=torch.bool)
    mask[:, shortest - 1 :] = ended == 0
    return ids, mask


def gradients(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs (N,) of the masked tokens and the gradient of every adapter tensor."""
    logits = model(input_ids=ids).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    (logps * weights[:, None])[mask].mean().backward()
    return logps[mask].detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    ids, mask = sampled(options.base, options.rows)
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(0))
    logps, wanted = gradients(policy(options.base, "plain"), ids, mask, weights)
    whole, cosine = torch.cat([one.flatten() for one in wanted.values()]), 0.0
    for compute in ("fused", "fp8"):
        found_logps, found = gradients(policy(options.base, compute), ids, mask, weights)
        flat = torch.cat([found[name].flatten() for name in wanted])
        cosine = torch.cosine_similarity(whole, flat, dim=0).item()
        worst = min(torch.cosine_similarity(wanted[n].flatten(), found[n].flatten(), dim=0).item() for n in wanted)
        norm = flat.norm() / whole.norm()
        print(
            f"{compute}: gradient cosine {cosine:.4f}, worst tensor {worst:.4f}, norm x {norm:.4f}; mean"
            f" |Δlogp| {(found_logps - logps).abs().mean():.4f} nats over {logps.numel():,} tokens"
        )
    return int(cosine < LEAST_COSINE)


if __name__ == "__main__":
    sys.exit(main())
