"""A CPU: language models inside vision-language checkpoints in vLLM: their log-probs, before and after a remerge.

    python bench/wrapped_server.py gemma3                                 # BF16
    python bench/wrapped_server.py qwen3_vl --weights fp8_per_channel
    python bench/wrapped_server.py qwen3_vl --checkpoint                  # merge's fp8 checkpoint, no remerge

A tiny random checkpoint of a family of `tests/unit/wrapped_models.py` and an adapter of random weights. Prints mean
and largest |Δlogp| (nats, 95 tokens) between vLLM and transformers in float32: on the base, on the base after the
adapter was folded in against the merged checkpoint, and between the two checkpoints. vLLM imports torchvision for
these models.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.run_directory import RunDir, write_json
from kit.weights.write_base import Original, write_base
from merge.merge import read_adapter, write_bf16, write_config
from merge.quantize import quantize_checkpoint
from merge.verify import base_checkpoint, load_for_scoring, log_probs
from tests.unit.merge_fixture import make_run
from tests.unit.wrapped_models import FAMILIES, make_wrapped

PROMPTS = [list(range(3, 40)), list(range(200, 140, -1))]
# Heads of sizes that vLLM's CPU kernels have.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
OWN: dict[str, dict[str, Any]] = {
    "gemma4": {"global_head_dim": 32},
    "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}
OWN |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ROPE)


def write_checkpoints(folder: Path, family: str) -> RunDir:
    """Write the original, a run on it, its merges `bf16` and `fp8`, and its `base`, into `folder`."""
    source = make_wrapped(folder / "original", family, **SIZES | OWN.get(family, {}))
    run = make_run(folder / "run", source, "bfloat16", update=0.02, target_modules="all-linear")
    base = base_checkpoint(run)
    updates = read_adapter(run.newest_adapter(), base)
    write_bf16(base, updates, folder / "bf16", lambda _: None, policy="grpo")
    quantize_checkpoint(folder / "bf16", folder / "fp8", "fp8", base, updates, lambda _: None, policy="grpo")
    (folder / "base").mkdir()
    info = write_base(Original(source, "bfloat16", True), folder / "base", "tiny", None)
    write_config(source, folder / "base", None)
    write_json(folder / "base" / "base.json", info)
    return run


def expected(directory: Path) -> torch.Tensor:
    """(95,) log-probs of the prompts' tokens by transformers in float32."""
    scores = log_probs(load_for_scoring(directory, dtype=torch.float32), [torch.tensor([ids]) for ids in PROMPTS])
    picked = [one.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] for one, ids in zip(scores, PROMPTS, strict=True)]
    return torch.cat(picked)


def served(engine: Any) -> torch.Tensor:
    """The same by vLLM."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    made = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    pairs = [zip(one.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True) for one in made]
    return torch.tensor([step[token].logprob for pair in pairs for step, token in pair])


def show(what: str, gaps: torch.Tensor) -> None:
    print(f"{what}: mean {gaps.abs().mean():.4f} max {gaps.abs().max():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--weights", help="vLLM's quantization of the base; default: none, BF16")
    parser.add_argument("--checkpoint", action="store_true", help="serve merge's fp8 checkpoint instead of the base")
    arguments = parser.parse_args()
    from vllm import LLM

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run = write_checkpoints(folder, arguments.family)
        base, merged = expected(folder / "base"), expected(folder / "bf16")
        show("merged checkpoint against base", merged - base)
        options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "seed": 0}
        options |= {"language_model_only": True, "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 28}
        if arguments.checkpoint:
            show("fp8 checkpoint", served(LLM(model=str(folder / "fp8"), **options)) - expected(folder / "fp8"))
            return
        options |= {"quantization": arguments.weights} if arguments.weights else {}
        extension = "kit.rollout.server.remerge.Remerge"
        engine = LLM(model=str(folder / "base"), worker_extension_cls=extension, **options)
        show("base", served(engine) - base)
        for method, words in (
            ("remerge_setup", (str(folder / "base"), "host")),
            ("remerge_stage", ("adapter", str(run.newest_adapter()))),
            ("remerge_activate", ("adapter",)),
        ):
            for answer in engine.collective_rpc(method, args=words):
                if "error" in answer:
                    sys.exit(f"error: {answer['error']}")
        show("after a remerge, against the merged checkpoint", served(engine) - merged)


if __name__ == "__main__":
    main()
