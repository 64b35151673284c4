"""The program of test_remerge_tensor_parallel.py: an engine of two workers, and its scores."""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from bench.random_adapter import random_adapter, save_adapters


def write_adapter(folder: Path) -> None:
    """A random adapter of rank 4, one of zeros, and base + adapter as a checkpoint."""
    weights = load_file(folder / "base" / "model.safetensors")
    names = json.loads((folder / "base" / "nf4" / "index.json").read_text())
    factors, merged = random_adapter(weights, list(names), 0.1, 0.1)
    save_adapters(factors, folder)
    shutil.copytree(folder / "base", folder / "merged", ignore=shutil.ignore_patterns("nf4"))
    save_file(weights | merged, folder / "merged" / "model.safetensors", {"format": "pt"})


def engine(model: Path, quantization: str | None) -> "vllm.LLM":  # noqa: F821
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="bfloat16",
        quantization=quantization,
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        worker_extension_cls="kit.rollout.server.remerge.Remerge",
    )


def scores(llm: "vllm.LLM") -> list[float]:  # noqa: F821
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(20, 60))}], params, use_tqdm=False)
    return [next(iter(place.values())).logprob for place in output.prompt_logprobs[1:]]


def main(folder: Path, weights: str) -> None:
    write_adapter(folder)
    # Loaded from the merged checkpoint, so that vLLM's own loading says what the workers should compute with; taken to
    # the base and back, so that a remerge that changes nothing shows.
    llm = engine(folder / "merged", None if weights == "bf16" else weights)
    found = {"fresh": scores(llm)}
    steps = [("remerge_setup", str(folder / "base"), "gpu")]
    for key in ("zero", "adapter"):
        steps += [("remerge_stage", key, str(folder / key)), ("remerge_activate", key)]
    for method, *arguments in steps:
        answers = llm.collective_rpc(method, args=tuple(arguments))
        if len(answers) != 2 or any("error" in answer for answer in answers):
            raise SystemExit(f"{method}: {answers}")
        if method == "remerge_activate":
            found[arguments[0]] = scores(llm)
    print("SCORES", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
