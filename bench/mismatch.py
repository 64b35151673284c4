"""Distance of the sampler from the policy, for every way to serve it, on a small model trained here: mean |Δlogp|.

    python bench/mismatch.py --seeds 3 --out mismatch.json
    python bench/mismatch.py --runs /tmp/real/nf4-0 /tmp/real/nf4-1 --out mismatch.json   # policies trained before

For each seed: a Qwen3 of 25 M parameters is supervised on noisy sums, 30 steps of GRPO train an adapter on its NF4
base, and vLLM samples 512 completions of that policy from {the original weights, the dequantized NF4 base} as {BF16,
FP8 per tensor, channel, block, FP8 per channel with an FP8 KV cache}, with the adapter {unmerged, merged}. The trainer
(NF4 base, adapter, BF16 autocast) scores the sampled tokens. With `--runs` each run takes the place of a seed: its
model, its dequantized base, its last adapter, its held-out problems, its temperature and lengths. Prints the table
last. Needs CUDA, vllm, bitsandbytes.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
STORAGE = {
    "bf16": {},
    "fp8_per_tensor": {"quantization": "fp8_per_tensor"},
    "fp8_per_channel": {"quantization": "fp8_per_channel"},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "fp8_per_channel, fp8 kv": {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"},
}
BASES, WAYS = ("original", "dequantized"), ("adapter", "remerge")
PROBLEMS, SAMPLES, TOKENS = 64, 8, 48


def make_base(out: Path, seed: int, steps: int) -> None:
    """Train a small model on the GPU whose greedy answers are right and whose samples often are not."""
    import torch

    from recipes import tiny_base

    rng = random.Random(seed)
    torch.manual_seed(seed)
    train = tiny_base.make_problems(20_000, False, 100, rng)
    heldout = tiny_base.make_problems(600, True, 100, rng)
    tokenizer = tiny_base.make_tokenizer(train[:3000], rng, 512)
    model = tiny_base.make_model(tokenizer, 512, 8, 512).cuda()
    rows = tiny_base.encode(tokenizer, train, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        tokens, labels = tiny_base.padded_batch(rng.sample(rows, 128))
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens.cuda(), labels=labels.cuda()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"seed {seed}: loss {loss.item():.3f}, {sum(p.numel() for p in model.parameters()):,} parameters")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name, problems in (("train", train), ("heldout", heldout)):
        lines = [json.dumps({"question": row["question"], "answer": row["answer"]}) for row in problems]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def call(arguments: list[str], log: Path, card: str | None = None) -> None:
    """Run a command line from the repository root, on a card; print its output and exit if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({} if card is None else {"CUDA_VISIBLE_DEVICES": card})
    with open(log, "w") as file:
        words = [sys.executable, *arguments]
        done = subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        print(log.read_text()[-3000:], flush=True)
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}")


def prepare(work: Path, seed: int, steps: int) -> None:
    """Build and train the policy of a seed, then prepare everything that its cells need."""
    folder = work / f"seed{seed}"
    make_base(folder / "original", seed, steps)
    keys = {"model.path": folder / "original", "model.dtype": "bfloat16", "data.path": folder / "original"}
    keys |= {"run.name": f"seed{seed}", "run.seed": seed, "run.output_dir": folder / "run"}
    keys |= {"train.max_steps": 30, "train.save_steps": 30, "train.learning_rate": 3e-4}
    keys |= {"rollout.max_completion_length": TOKENS}
    flat = [f"--{key}={value}" for key, value in keys.items()]
    call(["recipes/grpo_qlora.py", "--config", CONFIG, *flat], folder / "train.log")
    call(["-m", "merge", "base", "--config", CONFIG, *flat, "--out", str(folder / "dequantized")], folder / "base.log")
    prepare_run(folder, folder / "run")


def prepare_run(folder: Path, directory: Path) -> None:
    """Write what the cells of a run need: its dequantized base, the original with the adapter merged, policy.json."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from kit.core.config.load import config_from_dict
    from kit.core.run_directory import RunDir, base_directory
    from kit.data.problems import chat_messages, load_problems
    from kit.weights.frozen_base import BaseCheckpoint
    from merge.merge import read_adapter

    run = RunDir(directory)
    config = config_from_dict(run.config())
    if not (folder / "dequantized").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dequantized").symlink_to(base_directory(config).resolve())
    original, adapter = Path(config.model.source), run.adapter_dir(config.train.max_steps)
    merged = folder / "original-merged"
    shutil.copytree(original, merged)
    weights, sizes = load_file(original / "model.safetensors"), []
    base = BaseCheckpoint(original, json.loads((directory / "base.json").read_text()))
    for name, update in read_adapter(adapter, base).items():
        delta = update.delta()
        sizes.append(delta.norm().item() / weights[name].float().norm().item())
        weights[name] = (weights[name].float() + delta).to(torch.bfloat16)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    problems = load_problems(config.data, "eval")[:PROBLEMS]
    policy = {"original": str(original), "adapter": str(adapter), "config": run.config()}
    policy |= {"asked": [chat_messages(config.data, problem) for problem in problems]}
    (folder / "policy.json").write_text(json.dumps(policy))
    rewards = [row["reward"] for row in run.metrics()]
    print(
        f"{directory.name}: reward {sum(rewards[:5]) / 5:.2f} -> {sum(rewards[-5:]) / 5:.2f}, "
        f"|dW|/|W| {sum(sizes) / len(sizes):.2%}",
        flush=True,
    )


def policy_of(folder: Path) -> tuple[Any, dict]:
    """The configuration of a seed's run, and the policy.json that `prepare_run` wrote."""
    from kit.core.config.load import config_from_dict

    policy = json.loads((folder / "policy.json").read_text())
    return config_from_dict(policy["config"]), policy


def sample(folder: Path, base: str, storage: str, merged: bool) -> None:
    """Sample the policy of a seed from one engine; write token ids and log-probs for each way of serving."""
    import torch
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from eval.generate import render_prompts

    config, policy = policy_of(folder)
    adapter = Path(policy["adapter"])
    model = folder / ("original-merged" if merged and base == "original" else base)
    if base == "original" and not merged:
        model = policy["original"]
    remerge = merged and base == "dequantized"
    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=config.rollout.max_prompt_length + config.rollout.max_completion_length + 16,
        max_num_seqs=256,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enable_lora=not merged,
        max_lora_rank=config.policy.lora_rank,
        # Otherwise vLLM also gives the output layer LoRA slots, and 0.26 fails on a small tied vocabulary.
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        worker_extension_cls="kit.rollout.server.remerge.Remerge" if remerge else "",
        **STORAGE[storage],
    )
    if remerge:
        steps = [("remerge_setup", str(model), "gpu"), ("remerge_stage", "s/0", str(adapter))]
        for method, *arguments in [*steps, ("remerge_activate", "s/0")]:
            (answer,) = llm.collective_rpc(method, args=tuple(arguments))
            if "error" in answer:
                raise SystemExit(answer["error"])
    tokenizer = AutoTokenizer.from_pretrained(policy["original"])
    texts = render_prompts(tokenizer, policy["asked"], config.data.chat_template_kwargs)
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(
            n=SAMPLES,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_completion_length,
            logprobs=0,
            detokenize=False,
        ),
        lora_request=None if merged else LoRARequest("policy", 1, str(adapter)),
        use_tqdm=False,
    )
    rows = [
        (prompt, list(choice.token_ids), [next(iter(place.values())).logprob for place in choice.logprobs])
        for prompt, output in zip(prompts, outputs, strict=True)
        for choice in output.outputs
    ]
    torch.save(rows, cell_file(folder, base, storage, "remerge" if merged else "adapter"))


def cell_file(folder: Path, base: str, storage: str, way: str) -> Path:
    return folder / f"{base}-{storage.replace(', ', '-').replace(' ', '-')}-{way}.pt"


def score(folder: Path, storages: list[str]) -> dict[str, dict[str, float]]:
    """{cell: mean, p99 and max |Δlogp|, k3} of a seed's samples against the trainer's own log-probs."""
    import torch
    from peft import get_peft_model

    from kit.policy.load import load_adapter_weights, lora_config, set_adapter_dtype
    from kit.weights.frozen_base import load_nf4

    config, policy = policy_of(folder)
    model = get_peft_model(load_nf4(Path(policy["original"]), "bfloat16"), lora_config(config.policy))
    set_adapter_dtype(model, "float32")
    load_adapter_weights(model, Path(policy["adapter"]))
    found = {}
    for base in BASES:
        for storage in storages:
            for way in WAYS:
                deltas = []
                rows = torch.load(cell_file(folder, base, storage, way))
                for start in range(0, len(rows), 64):
                    deltas += _differences(model, rows[start : start + 64], config.rollout.temperature)
                d = torch.tensor(deltas, dtype=torch.float64)  # log policy - log sampler
                found[f"{base}|{storage}|{way}"] = {
                    "mean": d.abs().mean().item(),
                    "p99": d.abs().quantile(0.99).item(),
                    "max": d.abs().max().item(),
                    "k3": (d.exp() - 1 - d).mean().item(),
                    "tokens": len(d),
                }
    return found


def _differences(model, rows: list[tuple], temperature: float) -> list[float]:
    import torch

    width = max(len(prompt) + len(ids) for prompt, ids, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long, device="cuda")  # (B, T), left-padded as in training
    mask = torch.zeros_like(tokens)
    for index, (prompt, ids, _) in enumerate(rows):
        tokens[index, width - len(prompt) - len(ids) :] = torch.tensor(prompt + ids)
        mask[index, width - len(prompt) - len(ids) :] = 1
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].float() / temperature
    logps = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]  # (B, T - 1)
    found: list[float] = []
    for index, (_, ids, sampled) in enumerate(rows):
        found += (logps[index, -len(ids) :].cpu() - torch.tensor(sampled)).tolist()
    return found


def table(results: dict[int, dict], storages: list[str]) -> None:
    seeds = sorted(results)
    print(f"mean |Δlogp| a token, mean of {len(seeds)} seeds (least, greatest)")
    print(f"{'weights':<26}" + "".join(f"{f'{base}, {way}':>32}" for base in BASES for way in WAYS))
    for storage in storages:
        line = f"{storage:<26}"
        for base in BASES:
            for way in WAYS:
                values = [results[seed][f"{base}|{storage}|{way}"]["mean"] for seed in seeds]
                line += f"{f'{sum(values) / len(values):.5f} ({min(values):.5f}, {max(values):.5f})':>32}"
        print(line)
    for way in WAYS:
        for figure in ("mean", "k3"):
            ratios = [
                sum(results[s][f"original|{storage}|{way}"][figure] for s in seeds)
                / sum(results[s][f"dequantized|{storage}|{way}"][figure] for s in seeds)
                for storage in storages
            ]
            print(f"{figure}, original / dequantized, {way}:", " ".join(f"{ratio:.1f}" for ratio in ratios))
            if min(ratios) <= 1:
                raise SystemExit("the dequantized base is no nearer to the trainer than the original")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("/tmp/mismatch"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="supervised steps of the starting model")
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], help="run directories, instead of models made here"
    )
    # Blocks of 128 x 128 need layer sizes that are multiples of 128.
    parser.add_argument("--storage", nargs="+", choices=STORAGE, default=[*STORAGE], help="of the server's weights")
    parser.add_argument("--cards", nargs="+", default=[], help="GPUs that engines are spread over, as CUDA names them")
    parser.add_argument("--parallel", type=int, default=6, help="engines at once on the card")
    parser.add_argument("--out", type=Path, help="JSON with every number")
    parser.add_argument("--part", choices=("prepare", "sample", "score"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.work / f"seed{options.seed}"
    if options.part == "prepare" and options.runs:
        return prepare_run(folder, options.runs[options.seed].resolve())
    if options.part == "prepare":
        return prepare(options.work, options.seed, options.steps)
    if options.part == "sample":
        return sample(folder, options.cell[0], options.cell[1], options.cell[2] == "remerge")
    if options.part == "score":
        return folder.joinpath("score.json").write_text(json.dumps(score(folder, options.storage))) and None
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    started, script = time.perf_counter(), [str(Path(__file__)), "--work", str(options.work)]
    script += ["--storage", *options.storage]
    script += ["--runs", *map(str, options.runs)] if options.runs else []
    options.seeds = len(options.runs) or options.seeds

    def parts(jobs: list[list[str]], at_once: int) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            named = [(job, options.work / "logs" / f"{'-'.join(job).replace(' ', '_')}.log") for job in jobs]
            try:
                cards = [options.cards[at % len(options.cards)] if options.cards else None for at in range(len(named))]
                placed = zip(named, cards, strict=True)
                for done in [pool.submit(call, [*script, "--part", *job], log, card) for (job, log), card in placed]:
                    done.result()
            except SystemExit:
                pool.shutdown(cancel_futures=True)
                raise
        print(f"{jobs[0][0]}: {time.perf_counter() - started:.0f} s", flush=True)

    seeds = [str(seed) for seed in range(options.seeds)]
    parts([["prepare", "--seed", seed, "--steps", str(options.steps)] for seed in seeds], options.seeds)
    for seed in seeds:
        print((options.work / "logs" / f"prepare---seed-{seed}---steps-{options.steps}.log").read_text()[-300:])
    cells = [
        (seed, base, storage, way) for seed in seeds for base in BASES for storage in options.storage for way in WAYS
    ]
    parts([["sample", "--seed", seed, "--cell", *cell] for seed, *cell in cells], options.parallel)
    parts([["score", "--seed", seed] for seed in seeds], options.seeds)
    results = {int(s): json.loads((options.work / f"seed{s}" / "score.json").read_text()) for s in seeds}
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    table(results, options.storage)


if __name__ == "__main__":
    main()
