"""The program of test_remerge_tensor_parallel.py: an engine of two workers, and its scores."""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_adapter(folder: Path) -> None:
    """A random adapter of rank 4, one of zeros, and base + adapter as a checkpoint."""
    weights, generator = load_file(folder / "base" / "model.safetensors"), torch.Generator().manual_seed(0)
    factors = {}
    for name in json.loads((folder / "base" / "nf4" / "index.json").read_text()):
        rows, columns = weights[name].shape
        a = (torch.randn(4, columns, generator=generator) * 0.1).bfloat16()
        b = (torch.randn(rows, 4, generator=generator) * 0.1).bfloat16()
        weights[name] = (weights[name].float() + 2.0 * (b.float() @ a.float())).bfloat16()
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    zero = {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in factors.items()}
    for place, tensors in (("adapter", factors), ("zero", zero)):
        (folder / place).mkdir()
        save_file(tensors, folder / place / "adapter_model.safetensors", {"format": "pt"})
        (folder / place / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    shutil.copytree(folder / "base", folder / "merged", ignore=shutil.ignore_patterns("nf4"))
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})


def engine(model: Path) -> "vllm.LLM":  # noqa: F821
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="bfloat16",
        quantization="fp8_per_channel",
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


def main(folder: Path) -> None:
    write_adapter(folder)
    # Loaded from the merged checkpoint, so that vLLM's own loading says what the workers should compute with; taken to
    # the base and back, so that a remerge that changes nothing shows.
    llm = engine(folder / "merged")
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
    main(Path(sys.argv[1]))
