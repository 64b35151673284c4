"""Write a random-weight model directory and its problems, in a separate process so that the card is free afterwards.

python bench/step/model.py --out DIR --shape 8b --prompt 250
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parents[1]))

from memory_child import SHAPES, make_directory

CONTEXT, PROBLEMS = 8192, 512
BRANCHES = 0.1  # random branches of full size amplify rounding far beyond what a trained model shows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--prompt", type=int, required=True, help="tokens of every prompt")
    options = parser.parse_args()
    started = time.perf_counter()
    make_directory(options.out, options.shape, options.prompt, PROBLEMS)
    file = options.out / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT}))

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.out), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(BRANCHES)
    model.save_pretrained(options.out, max_shard_size="4GB")
    (options.out / "COMPLETE").touch()
    print(f"model: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
