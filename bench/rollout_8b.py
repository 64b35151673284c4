"""Syncs and rollouts of an 8B shape via the real server and the trainer's own client, and both on one small card.

    python bench/rollout_8b.py --part speed      # one GPU: sync seconds and tok/s, remerge, adapter, BF16, offline
    python bench/rollout_8b.py --part weights    # one GPU: bf16, fp8, w4a16: memory, tok/s, sync seconds, k3
    python bench/rollout_8b.py --part sync       # one GPU: sync seconds of remerge, both transports
    python bench/rollout_8b.py --part one_card   # one GPU: trainer and server together within --limit_gib
    python bench/rollout_8b.py --part split      # two GPUs: the trainer on one, the server on the other

Random weights of Qwen3-8B's shape, with the residual branches scaled down so that FP8 noise does not drown the canary.
The trainer is the recipe's, with its NF4 base on the same card; a version is its adapter after a simulated optimizer
step. Needs CUDA, vllm, bitsandbytes. Prints tables last.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
MODES = {
    "fp8 remerge": {"server.weights": "fp8_per_channel", "rollout.sync": "remerge"},
    "fp8 adapter": {"server.weights": "fp8_per_channel", "rollout.sync": "adapter"},
    "bf16": {"server.weights": "bf16", "rollout.sync": "remerge"},
}
# Keyed by server.weights; `trained` also sets policy.quant_cfg.
WEIGHTS = {
    "bf16": MODES["bf16"],
    "fp8": MODES["fp8 remerge"],
    "w4a16": {"server.weights": "w4a16", "rollout.sync": "remerge"},
    "w4a16 trained": {"server.weights": "w4a16", "rollout.sync": "remerge", "policy.quant_cfg": "w4a16"},
}
SIZES, GROUP, PROMPT, NEW, SYNCS = (64, 256, 512), 8, 256, 512, 6
KV_GIB = 58  # 512 sequences of 768 tokens
FEWER, FEWER_KV_GIB = SIZES[:2], 30  # --part weights: a card of 80 GB has room for them beside BF16 weights


def prepare(work: Path, layers: int) -> None:
    """Write the model, as path_8b.py makes it, and its dequantized base by the user's command."""
    import torch
    from path_8b import command, make_model

    if not (work / "tiny").exists():
        command("tiny", ["recipes/tiny_base.py", "--out", str(work / "tiny"), "--steps", "0"], work)
    parameters = make_model(work / "model", work / "tiny", layers, branches=0.1)
    print(f"{parameters:.2f} B parameters", flush=True)
    torch.cuda.empty_cache()
    seconds, _ = command("base", ["-m", "merge", "base", *flags(work, {})], work)
    print(f"merge base: {seconds:.0f} s", flush=True)


def flags(work: Path, changes: dict[str, Any]) -> list[str]:
    """Command line of a run on this model, shared by the trainer and the server."""
    keys = {"run.name": "run8b", "run.output_dir": work / "run", "model.path": work / "model"}
    keys |= {"server.adapter_roots": f"['{work}']"}  # trainers in directories of their own
    keys |= {"model.dtype": "bfloat16", "data.path": work / "tiny", "server.base": work / "base"}
    keys |= {"rollout.group_size": GROUP, "rollout.max_prompt_length": PROMPT, "rollout.max_completion_length": NEW}
    keys |= {"rollout.backend": "server", "rollout.max_sampler_k3": 5, "rollout.max_canary_delta": 5}
    keys |= {"server.max_num_seqs": max(SIZES), "server.kv_cache_gib": KV_GIB, "server.enforce_eager": "false"}
    keys |= {"train.learning_rate": "1e-5"}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in (keys | changes).items())]


class Server:
    """`python -m launch.server`: ready on entry, ended on exit."""

    def __init__(self, work: Path, changes: dict[str, Any]):
        self.command = [sys.executable, "-m", "launch.server", *flags(work, changes), "--detach"]
        self.end = [sys.executable, "-m", "launch.server", "stop", *flags(work, changes)]

    def __enter__(self) -> float:
        started = time.perf_counter()
        done = subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit((done.stdout + done.stderr)[-6000:])
        return time.perf_counter() - started

    def __exit__(self, *problem: Any) -> None:
        subprocess.run(self.end, cwd=ROOT, capture_output=True, text=True)


def build_trainer(work: Path, quant_cfg: str | None = None) -> Any:
    """The recipe's trainer on its NF4 base, not started and without a rollout backend; trains for `quant_cfg`."""
    from kit.train.trainer import PolicyTrainer
    from recipes import grpo_qat, grpo_qlora

    class Built(Exception):
        pass

    def stop(trainer: Any, resume: bool) -> None:
        raise Built(trainer)

    PolicyTrainer.train_run = stop
    changes = {"rollout.backend": "in_process", "run.output_dir": work / f"t-{quant_cfg}"}
    changes |= {"policy.quant_cfg": quant_cfg} if quant_cfg else {}
    sys.argv = ["recipe", *flags(work, changes)]
    try:
        (grpo_qat if quant_cfg else grpo_qlora).main()
    except Built as built:
        return built.args[0]
    raise SystemExit("the recipe did not start its trainer")


def made_up_step(trainer: Any, step: int) -> None:
    """Simulate an optimizer step: changed adapter weights, and a version number increased by one."""
    import torch

    generator = torch.Generator("cuda").manual_seed(step)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, device="cuda", generator=generator)
            parameter.data.add_(noise, alpha=2e-3)
    trainer.state.global_step = step
    torch.cuda.synchronize()


def connect(work: Path, trainer: Any, changes: dict[str, Any]) -> Any:
    """The trainer's client for the running server."""
    from kit.core.config.load import load_config
    from kit.core.run_directory import RunDir
    from kit.policy.load import check_base
    from kit.train.setup import make_rollout

    config = load_config(CONFIG, flags(work, changes)[2:])
    rollout = make_rollout(config, trainer.processing_class, check_base(config), RunDir(work / "run"))
    rollout.check_base(trainer.policy.base_hash)
    return rollout


def measure_syncs(rollout: Any, trainer: Any) -> dict[str, Any]:
    """Median milliseconds from the end of an optimizer step to the first token of the new version."""
    import statistics

    prompt = [random.randrange(3, 250) for _ in range(PROMPT)]
    rollout.sync.scorer.choose([[random.randrange(3, 250) for _ in range(64)] for _ in range(4)])
    rows = []
    switch, inside = rollout.replicas[0].activate, {}
    rollout.replicas[0].activate = lambda *version: inside.update(switch(*version))
    for step in range(SYNCS):
        made_up_step(trainer, step)
        started = time.perf_counter()
        figures = rollout.sync.update(trainer.policy)
        synced = time.perf_counter()
        sampling = {"n": 1, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}
        session, served = rollout.sync.session, rollout.sync.served
        rollout.replicas[0].generate(f"first-{step}", prompt, **sampling, session=session, version=served)
        now = time.perf_counter()
        parts = {name: 1e3 * value for name, value in figures["sync_seconds"].items()}
        rows.append(parts | {"sync": 1e3 * (synced - started), "to first token": 1e3 * (now - started)})
        rows[-1] |= {f"activate: {part}": 1e3 * value for part, value in inside.items()}
        rows[-1] |= {f"canary {key}": figures.get(f"canary_{key}", 0.0) for key in ("delta", "k3")}
    # In the first sync the server reads its NF4 copy and every kernel warms up.
    return {key: statistics.median(row[key] for row in rows[1:]) for key in rows[-1]} | {"first": rows[0]["sync"]}


def measure_speed(rollout: Any, sizes: tuple[int, ...] = SIZES) -> dict[int, float]:
    """Completion tokens per second by number of sequences, with prompts never seen before."""
    found = {}
    for size in (sizes[0], *sizes):  # the first time warms up
        prompts = [[random.randrange(3, 250) for _ in range(PROMPT)] for _ in range(size // GROUP)]
        started = time.perf_counter()
        samples = rollout._generate_groups([list(ids) for ids in prompts for _ in range(GROUP)], [])
        found[size] = sum(len(sample[0]) for sample in samples) / (time.perf_counter() - started)
    return found


def speed(work: Path) -> dict[str, Any]:
    """Measure the modes one after the other, then the offline engine."""
    trainer = build_trainer(work)
    results: dict[str, Any] = {}
    for mode, changes in MODES.items():
        with Server(work, changes) as start_s:
            rollout = connect(work, trainer, changes)
            sync = measure_syncs(rollout, trainer)
            results[mode] = {"start_s": start_s, "sync_ms": sync, "tok_s": measure_speed(rollout)}
            if mode == "fp8 remerge":
                body = connect(work, trainer, changes | {"rollout.transport": "body"})
                results[mode]["sync_by_body_ms"] = measure_syncs(body, trainer)
        print(mode, json.dumps(results[mode]), flush=True)
    done = subprocess.run(
        [sys.executable, __file__, "--part", "offline", "--work", str(work)], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OFFLINE ")]
    if not lines:
        raise SystemExit((done.stdout + done.stderr)[-4000:])
    results["offline fp8"] = {"tok_s": {int(k): v for k, v in json.loads(lines[-1][8:]).items()}}
    return results


def weights(work: Path, modes: list[str]) -> dict[str, Any]:
    """Measure what `server.weights` changes, one after the other: the server's memory without its KV cache, in GiB,
    syncs, tok/s and k3 of the canary, whose sequences the trainer scores."""
    trainers: dict[str | None, Any] = {}
    results: dict[str, Any] = {}
    for mode in modes:
        changes, before = WEIGHTS[mode] | {"server.kv_cache_gib": FEWER_KV_GIB}, card_gib()
        with Server(work, changes) as start_s:
            found = {"start_s": start_s, "server_gib": card_gib() - before - FEWER_KV_GIB}
            if (fmt := changes.get("policy.quant_cfg")) not in trainers:
                trainers.clear()  # one at a time on the card
                trainers[fmt] = build_trainer(work, fmt)
            rollout = connect(work, trainers[fmt], changes)
            found["sync_ms"] = measure_syncs(rollout, trainers[fmt])
            found["tok_s"] = measure_speed(rollout, FEWER)
        results[mode] = found
        print(mode, json.dumps(found), flush=True)
    titles = f"{'weights':<14} {'GiB':>6} {'start s':>8} {'sync ms':>8} {'fold ms':>8} {'canary k3':>10}"
    print(titles + "".join(f" {f'tok/s {size}':>10}" for size in FEWER))
    for mode, found in results.items():
        sync = found["sync_ms"]
        print(
            f"{mode:<14} {found['server_gib']:>6.1f} {found['start_s']:>8.0f} {sync['sync']:>8.0f} "
            f"{sync['activate: remerge']:>8.0f} {sync['canary k3']:>10.2g} "
            + " ".join(f"{found['tok_s'][size]:>10,.0f}" for size in FEWER)
        )
    return results


def card_gib() -> float:
    """Memory in use on the card, of all processes."""
    import pynvml

    pynvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(int(first))).used / 2**30


def syncs(work: Path) -> dict[str, Any]:
    """Measure the cost of a sync, for remerge only."""
    trainer = build_trainer(work)
    changes = MODES["fp8 remerge"] | {"server.kv_cache_gib": 4}
    with Server(work, changes):
        found = {"path": measure_syncs(connect(work, trainer, changes), trainer)}
        body = connect(work, trainer, changes | {"rollout.transport": "body"})
        found["body"] = measure_syncs(body, trainer)
        # Without the canary the trainer runs nothing on the card meanwhile, as if it had a card of its own.
        alone = connect(work, trainer, changes | {"rollout.canary_prompts": 0})
        found["path, no canary"] = measure_syncs(alone, trainer)
    for name, parts in found.items():
        print(f"sync by {name}, ms: " + ", ".join(f"{part} {value:.3g}" for part, value in parts.items()), flush=True)
    return found


def offline(work: Path) -> None:
    """vLLM's offline engine with the same weights and options, no LoRA: the reference for the HTTP path."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(work / "base"),
        dtype="bfloat16",
        quantization="fp8_per_channel",
        max_model_len=PROMPT + NEW + 1,
        max_num_seqs=max(SIZES),
        kv_cache_memory_bytes=KV_GIB << 30,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    params = {"temperature": 1.0, "max_tokens": NEW, "logprobs": 0, "detokenize": False, "flat_logprobs": True}
    found = {}
    for size in (SIZES[0], *SIZES):
        prompts = [{"prompt_token_ids": [random.randrange(3, 250) for _ in range(PROMPT)]} for _ in range(size // 8)]
        started = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(n=GROUP, **params), use_tqdm=False)
        tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        found[size] = tokens / (time.perf_counter() - started)
    print("OFFLINE", json.dumps(found), flush=True)


class MemoryWatch(threading.Thread):
    """Peak memory in use on the card, both processes and their CUDA contexts, sampled every 50 ms."""

    def __init__(self, card: int | None = None) -> None:
        super().__init__(daemon=True)
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self.card = int(first) if card is None else card
        self.peak_gib, self.running = 0.0, True

    def run(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(self.card)
        while self.running:
            self.peak_gib = max(self.peak_gib, pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30)
            time.sleep(0.05)


def one_card(work: Path, limit_gib: float, sleep: bool, further: list[str], out: Path | None) -> None:
    """Run two steps of one group of 8 completions of 2,048 tokens, trainer and server on one card."""
    from path_8b import command

    tokens = 2048
    changes = {"rollout.max_prompt_length": 64, "rollout.max_completion_length": tokens, "rollout.sync": "remerge"}
    changes |= {"server.weights": "fp8_per_channel", "server.kv_cache": "fp8", "server.kv_cache_gib": 1.4}
    changes |= {"server.max_num_seqs": GROUP, "server.nf4_copy": "host", "server.sleep": str(sleep).lower()}
    changes |= {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": GROUP}
    changes |= {"train.recompute": "full", "train.max_steps": 2, "train.save_steps": 2}
    directory = work / f"onecard-{time.time_ns()}"
    changes |= {"train.max_gpu_gib": 9, "run.name": "onecard", "run.output_dir": directory}
    changes |= {"server.enforce_eager": "true"}  # as in the recipe for such a card
    changes |= dict(item.split("=", 1) for item in further)
    watch = MemoryWatch()
    watch.start()
    with Server(work, changes) as start_s:
        time.sleep(1)
        idle, watch.peak_gib = watch.peak_gib, 0.0
        command("onecard", ["recipes/grpo_qlora.py", *flags(work, changes)], work)
    watch.running = False
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    peak = max(idle, watch.peak_gib)
    found = {"sleep": sleep, "further": further, "start_s": start_s, "server_alone_gib": idle, "card_peak_gib": peak}
    found |= {"trainer_peak_gib": last["peak_gib"], "tokens": last["completion_tokens"]}
    found |= {key: last[key] for key in ("seconds", "rollout_tokens_per_s", "sampler_k3")}
    print("one card", json.dumps(found), flush=True)
    if out:
        out.write_text(json.dumps(found, indent=1))
    if peak > limit_gib:
        raise SystemExit(f"trainer and server took {peak:.2f} GiB of the card, more than {limit_gib}")
    print(f"trainer and server took at most {peak:.2f} GiB of the card, {limit_gib} were allowed")


def split(work: Path, out: Path | None) -> None:
    """Run three steps of 64 completions of at most 512 tokens: the trainer on GPU 0, the server on GPU 1."""
    from path_8b import command

    directory = work / f"split-{time.time_ns()}"
    changes = MODES["fp8 remerge"] | {"server.gpus": "[1]", "server.max_num_seqs": SIZES[0], "server.kv_cache_gib": 10}
    changes |= {"train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 8}
    changes |= {"train.recompute": "full", "train.max_steps": 3, "train.save_steps": 3}
    changes |= {"run.name": "split", "run.output_dir": directory}
    cards = [MemoryWatch(0), MemoryWatch(1)]
    for card in cards:
        card.start()
    with Server(work, changes) as start_s:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        command("split", ["recipes/grpo_qlora.py", *flags(work, changes)], work)
        del os.environ["CUDA_VISIBLE_DEVICES"]
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    found = {"start_s": start_s, "trainer_card_gib": cards[0].peak_gib, "server_card_gib": cards[1].peak_gib}
    keys = ("seconds", "sync_seconds", "rollout_tokens_per_s", "update_tokens_per_s", "completion_tokens")
    found |= {key: last[key] for key in (*keys, "sampler_k3", "peak_gib")}
    print("trainer on GPU 0, server on GPU 1, last of 3 steps:")
    print("\n".join(f"{key:<20} {value}" for key, value in found.items()), flush=True)
    if out:
        out.write_text(json.dumps(found, indent=1))


def table(results: dict[str, Any]) -> None:
    print(f"{'tok/s at':<14}" + "".join(f"{size:>10}" for size in SIZES))
    for mode, found in results.items():
        print(f"{mode:<14}" + "".join(f"{found['tok_s'][size]:>10,.0f}" for size in SIZES))
    remerge = results["fp8 remerge"]["tok_s"]
    for other in ("fp8 adapter", "bf16", "offline fp8"):
        print(f"remerge / {other:<12}" + "".join(f"{remerge[s] / results[other]['tok_s'][s]:>10.3f}" for s in SIZES))
    for mode in MODES:
        for key in ("sync_ms", "sync_by_body_ms"):
            if key in results[mode]:
                parts = results[mode][key].items()
                print(f"{mode}, {key}: " + ", ".join(f"{name} {value:.3g}" for name, value in parts))
    missed = [
        f"remerge / {other} {remerge[size] / results[other]['tok_s'][size]:.3f} at {size}, at least {least} wanted"
        for other, least in (("fp8 adapter", 1.25), ("bf16", 1.15), ("offline fp8", 0.95))
        for size in SIZES
        if remerge[size] / results[other]["tok_s"][size] < least
    ]
    if missed:
        raise SystemExit("\n".join(missed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", choices=("speed", "weights", "sync", "offline", "one_card", "split"), required=True)
    parser.add_argument("--weights", nargs="+", choices=tuple(WEIGHTS), default=list(WEIGHTS), help="weights: which")
    parser.add_argument("--work", type=Path, default=Path("/tmp/rollout8b"))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--limit_gib", type=float, default=23.5, help="one_card: what a 24 GB card has to give")
    parser.add_argument("--sleep", action="store_true", help="one_card: the server sleeps during the update")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one_card: a further setting")
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    os.chdir(ROOT)
    if options.part == "offline":
        return offline(options.work)
    if not (options.work / "base" / "manifest.json").is_file():
        prepare(options.work, options.layers)
    if options.part == "one_card":
        return one_card(options.work, options.limit_gib, options.sleep, options.set, options.out)
    if options.part == "split":
        return split(options.work, options.out)
    if options.part == "weights":
        found = weights(options.work, options.weights)
    else:
        found = speed(options.work) if options.part == "speed" else syncs(options.work)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    if options.part == "speed":
        table(found)


if __name__ == "__main__":
    main()
