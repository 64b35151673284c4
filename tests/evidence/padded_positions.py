"""How far a perfect sampler seems to be from the policy when positions count from the padding: k3 and mean |Δlogp|.

    python tests/evidence/padded_positions.py --base models/tiny-base --longest 64 256 1024

The sampler is the policy itself: an NF4 base in BF16 that scores every completion alone, without padding. The policy
scores the same rows in one padded batch, as the update does without `train.micro_batch_tokens`, with positions that
count from the padding (as stock TRL 1.16) and with the update's own. Prompts are padded to `--longest` tokens, as a
longer prompt in the batch would. Not covered: the rounding of a server's own kernels.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from transformers import AutoTokenizer

from kit.core.config.load import load_config
from kit.data.problems import chat_messages, load_problems
from kit.train.rows import padded_positions
from kit.weights.frozen_base import load_nf4

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
COMPLETION = 48


def log_probs(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, own: bool) -> torch.Tensor:
    """Log-probs (B, C) of the completions; `own` positions, or those that the model counts from the first column."""
    positions = {"position_ids": padded_positions(mask)} if own else {}
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **positions).logits
    chosen = logits[:, -COMPLETION - 1 : -1].float().log_softmax(-1)
    return chosen.gather(2, ids[:, -COMPLETION:, None]).squeeze(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", required=True, help="what recipes/tiny_base.py wrote")
    parser.add_argument("--longest", type=int, nargs="+", default=[64, 256, 1024], help="tokens of the longest prompt")
    parser.add_argument("--rows", type=int, default=64, help="completions")
    options = parser.parse_args()
    config = load_config(CONFIG, [f"--model.path={options.base}", f"--data.path={options.base}"])
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = load_nf4(options.base, "bfloat16").eval()
    rows = []
    torch.manual_seed(0)
    for problem in load_problems(config.data, "train")[: options.rows]:
        prompt = tokenizer.apply_chat_template(
            chat_messages(config.data, problem), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"].to(model.device)
        sampling = {"do_sample": True, "max_new_tokens": COMPLETION, "min_new_tokens": COMPLETION, "top_k": 0}
        with torch.autocast(model.device.type, torch.bfloat16):
            rows.append(model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **sampling))
    alone = torch.cat([log_probs(model, row, torch.ones_like(row), own=True) for row in rows])
    print("| longest prompt | positions | k3 | mean abs Δlogp |\n|---|---|---|---|")
    for longest in options.longest:
        width = longest + COMPLETION
        padded = [torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows]
        mask = [torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows]
        for own, name in ((False, "from the padding"), (True, "from the first token")):
            off = (log_probs(model, torch.cat(padded), torch.cat(mask), own) - alone).double()
            k3 = (off.exp() - 1 - off).mean().item()
            print(f"| {longest} | {name} | {k3:.1e} | {off.abs().mean().item():.5f} |", flush=True)


if __name__ == "__main__":
    main()
