"""The program of test_remerge_tensor_parallel.py: an engine of one or two workers, and its scores."""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from bench.random_adapter import random_adapter, save_adapters
from kit.core.formats import FORMATS, packed_format
from kit.rollout.server import packed_config


def write_adapter(folder: Path, weights: str) -> None:
    """A random adapter of rank 4, one of zeros, and base + adapter as a checkpoint, in a packed format if `weights` is
    one."""
    tensors = load_file(folder / "base" / "model.safetensors")
    names = json.loads((folder / "base" / "nf4" / "index.json").read_text())
    factors, merged = random_adapter(tensors, list(names), 0.1, 0.1)
    save_adapters(factors, folder)
    shutil.copytree(folder / "base", folder / "merged", ignore=shutil.ignore_patterns("nf4"))
    tensors = tensors | merged
    if (fmt := packed_format(weights)) is not None:
        tensors = pack(folder, fmt.name, tensors, list(names))
    save_file(tensors, folder / "merged" / "model.safetensors", {"format": "pt"})


def pack(folder: Path, name: str, tensors: dict, quantized: list[str]) -> dict:
    """The tensors as `python -m merge` stores them in a format; its configuration is written to `merged`."""
    from merge.quantize import store

    fmt = packed_config.fitted_to_base(FORMATS[name], folder / "base")
    for weight in quantized:
        stored = store(fmt, tensors.pop(weight), lambda *_: None)
        tensors |= {f"{weight.removesuffix('.weight')}.{key}": part for key, part in stored.items()}
    file = folder / "merged" / "config.json"
    facts = packed_config.quantization_config(fmt, folder / "base")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": facts}))
    return tensors


def engine(model: Path, weights: str, workers: int) -> "vllm.LLM":  # noqa: F821
    from vllm import LLM

    options, fmt = {}, packed_format(weights)
    if fmt is not None and model.name == "base":
        facts = packed_config.quantization_config(fmt, model)
        options = {"load_format": packed_config.LOAD_FORMAT, "hf_overrides": {"quantization_config": facts}}
    elif fmt is None and weights != "bf16":
        options = {"quantization": weights}
    return LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        tensor_parallel_size=workers,
        worker_extension_cls=packed_config.EXTENSION if fmt else "kit.rollout.server.remerge.Remerge",
        **options,
    )


def scores(llm: "vllm.LLM") -> list[float]:  # noqa: F821
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(20, 60))}], params, use_tqdm=False)
    return [next(iter(place.values())).logprob for place in output.prompt_logprobs[1:]]


def main(folder: Path, weights: str, workers: int) -> None:
    write_adapter(folder, weights)
    # Loaded from the merged checkpoint, so that vLLM's own loading says what the workers should compute with; taken to
    # the base and back, so that a remerge that changes nothing shows.
    llm = engine(folder / "merged", weights, workers)
    found = {"fresh": scores(llm)}
    steps = [("remerge_setup", str(folder / "base"), "gpu")]
    for key in ("zero", "adapter"):
        steps += [("remerge_stage", key, str(folder / key)), ("remerge_activate", key)]
    for method, *arguments in steps:
        answers = llm.collective_rpc(method, args=tuple(arguments))
        if len(answers) != workers or any("error" in answer for answer in answers):
            raise SystemExit(f"{method}: {answers}")
        if method == "remerge_activate":
            found[arguments[0]] = scores(llm)
    if packed_format(weights):  # the base, which vLLM reads in 16 bits
        found["base"] = scores(engine(folder / "base", weights, workers))
    print("SCORES", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
