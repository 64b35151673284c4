"""Two cards: whole steps of GRPO, stock TRL against the recipe, lever by lever, on the same lengths.

    python tests/gpu/bench_step.py --load A --variants plain fp8+liger+shared --out A.json
    python tests/gpu/bench_step.py --load B --rounds 2 --variants default --out B.json
    python tests/gpu/bench_step.py --load A --variants default+overlap --stock A.json --out A2.json  # no stock again
    python tests/gpu/bench_step.py --part scaling --out scaling.json
    python tests/gpu/bench_step.py --rehearse --out x.json  # the same path on a CPU, without NCCL

An 8B shape with random weights, 250-token prompts, groups of 8, beta .01, LoRA of rank 16 on all linear layers; the
trainer on GPU 0, both servers on GPU 1. Work A: 128 completions of 1,024 tokens. B: 128 of log-normal lengths, median
400, sigma .8, cut at 2,048. C: 32 of 4,096. A plugin in both vLLM servers fixes the lengths (bench_lengths.py).

Stock: TRL 1.16, BF16, `vllm serve` as `trl vllm-serve` starts it, micro-batch 8, gradient checkpointing. Ours: the
recipe's main() under accelerate with a reward that random text can earn, NF4, FP8 server with remerge. A variant is
levers of workload.py joined by +, or written key=value; `plain` is every lever off, `default` what the configuration
says when nothing is asked for. With --rounds the sides alternate. --warm steps come first and do not count; figures
are medians of the others. `step` is wall-clock from the end of one step to the end of the next, `gen` what the trainer
waited for completions, `refs` the forwards without gradients, `upd` forward, backward and optimizer; tok/s of rollout
and update are over gen and upd. `mfu` is the useful operations (workload.py) over refs + upd and 989 TFLOP/s.
`trainer` is torch's peak, `card 0` what the driver saw of that card, `server` what the server took when ready.

It stops at --limit_s, ends what it started, and prints what is there. Exit 1 when a row failed or was left out.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent / "bench"))

from memory_child import SHAPES, nvidia_smi
from servers import MEETING_PORT, READY_S, CardWatch, Child, Failed, OurServer, StockServer, run_flags, write_plugin
from workload import LEVERS, PEAK_FLOPS, TINY_WORKS, WORKS, Work, step_flops

from recipes.parts.rundir import write_json

OFF = {"policy.compute": "plain", "policy.kernels": "torch", "train.recompute": "full", "rollout.overlap": "false"}
OFF |= {"train.micro_batch_tokens": "null", "train.optimizer": "adamw_torch", "train.recompute_offload": "false"}
VARIANTS = {"plain": {}, **LEVERS, "overlap": {"rollout.overlap": "true"}, "default": {}}
PHASES = ("step", "generate", "sync", "logps", "update")
LEAST_S = {"stock": 100.0, "ours": 60.0}  # a side is not begun with less left


def levers(variant: str) -> dict[str, str]:
    """The configuration keys of a variant."""
    names = variant.split("+")
    keys = {} if "default" in names else dict(OFF)
    for name in names:
        key, is_key, value = name.partition("=")
        keys |= {key: value} if is_key else VARIANTS[name]
    return keys


class Bench:
    """Options, servers and rows of one call."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.started = options, time.time()
        self.work: Path = options.work.resolve()
        self.load: Work = (TINY_WORKS if options.rehearse else WORKS)[options.load]
        self.shape = SHAPES["tiny" if options.rehearse else "8b"]
        self.cpu, self.rows, self.children = options.rehearse, [], []
        self.servers: dict[str, Any] = {}
        self.broken: dict[str, str] = {}  # sides that cannot run, and why; the other one goes on
        self.server_gib: dict[str, float | None] = {}
        self.watch = CardWatch()
        self.runs, self.call = 0, int(self.started)  # the work directory holds the runs of other calls, too

    def flags(self, name: str, gpus: list[int] | None = None, replicas: int = 1) -> list[str]:
        """The command line of a run of ours; its servers' cards are GPU 1 unless said."""
        gpus = None if self.cpu else gpus or [1]
        return run_flags(self.work, self.load, self.shape, name, gpus, replicas)

    @property
    def left(self) -> float:
        """Seconds until it has to be over; ending the servers takes some, too."""
        return self.started + self.options.limit_s - 25 - time.time()

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.started:.0f} s] {text}", flush=True)

    def child(self, name: str, words: list, limit_s: float, **more: str) -> Child:
        """Run a command to its end; `Failed` otherwise."""
        child = Child(name, words, self.work, **more)
        self.children.append(child)
        try:
            child.wait(min(limit_s, max(1.0, self.left)))
        finally:
            self.children.remove(child)
        self.say(f"{name}: {time.time() - child.started:.0f} s")
        return child

    def prepare(self, with_stock: bool) -> None:
        """The model, stock's server, and beside it the dequantized base."""
        write_plugin(self.work, self.load)
        if not (self.work / "model" / "COMPLETE").is_file():
            shape = "tiny" if self.cpu else "8b"
            words = ["tests/gpu/bench/model.py", "--out", self.work / "model", "--shape", shape]
            self.child("model", [*words, "--prompt", self.load.prompt], 200)
        before = self.used(1)
        if with_stock:
            self.servers["stock"] = StockServer(self.work, self.load, None if self.cpu else 1, self.shape)
        if self.wants_ours and not (self.work / "base" / "manifest.json").is_file():
            words = ["-m", "merge", "base", *self.flags("base")]
            with self.going_on("ours"):
                self.child("base", words, 200, CUDA_VISIBLE_DEVICES="" if self.cpu else "0")
        if with_stock:
            with self.going_on("stock"):
                self.servers["stock"].wait(min(READY_S, self.left))
                self.server_gib["stock"] = self.grown(1, before)
                self.say("the stock server is ready")

    @contextlib.contextmanager
    def going_on(self, side: str) -> Iterator[None]:
        """A failure in the block breaks one side only."""
        try:
            yield
        except Failed as error:
            self.broken[side] = str(error)
            self.say(f"{side}: {error}")

    @property
    def wants_ours(self) -> bool:
        return bool(self.options.variants) or self.options.part == "scaling"

    def used(self, card: int) -> float | None:
        return self.watch.now[card] if card < len(self.watch.now) else None

    def grown(self, card: int, before: float | None) -> float | None:
        now = self.used(card)
        return now - before if now is not None and before is not None else None

    def start_ours(self) -> None:
        """Begin to start our server; it gets ready during stock's first step, which is not measured."""
        self.ours_from = self.used(1)
        self.servers["ours"] = OurServer(self.work, self.flags("server"))

    def wait_ours(self) -> None:
        if "ours" in self.server_gib:
            return
        self.servers["ours"].wait(min(READY_S, self.left))
        self.server_gib["ours"] = self.grown(1, self.ours_from)
        self.say("our server is ready")

    def run(self, side: str) -> None:
        """One row: a side's steps, or its error. What it leaves on the disk is in a directory of its own."""
        row: dict[str, Any] = {"side": side, "load": self.options.load}
        kind = "stock" if side == "stock" else "ours"
        try:
            if kind in self.broken:
                raise Failed(self.broken[kind])
            if self.left < (0 if self.cpu else LEAST_S[kind]):
                raise Failed(f"{self.left:.0f} s were left, {LEAST_S[kind]:.0f} are needed")
            if kind == "ours":
                self.wait_ours()
            self.watch.reset()
            steps = self.stock_steps() if kind == "stock" else self.our_steps(side)
            row |= self.figures(steps) | {"server_gib": self.server_gib.get(kind), "card_gib": self.watch.peak(0)}
        except Failed as error:
            row["error"] = str(error)
            self.say(f"{side}: {error}")
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
            self.say(f"{side}: {row['error']}")
        self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if "step" in row:
            parts = ", ".join(f"{name} {row[name]:.2f}" for name in PHASES)
            self.say(f"{row['side']}: {parts} s; {row['update_tok_s']:,.0f} tok/s, {row['peak_gib']:.2f} GiB")
        options = self.options
        head = {"card": nvidia_smi("name"), "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
        head |= {"load": options.load, "lengths": self.load.lengths, "limit_s": options.limit_s}
        write_json(options.out, head | {"rows": self.rows})

    def stock_steps(self) -> list[dict[str, Any]]:
        """Stock's rows, also those of a run that was cut short."""
        name, options = f"stock-{self.call}-{self.runs}", self.options
        self.runs += 1
        words = ["tests/gpu/bench/stock_step.py", "--model", self.work / "model", "--url", StockServer.url]
        words += ["--load", options.load, "--steps", options.warm + options.steps]
        words += ["--rehearse"] if self.cpu else []
        return self.steps_of(
            name,
            words,
            lambda log: [
                json.loads(line[4:])
                for line in log.read_text(errors="replace").splitlines()
                if line.startswith("ROW ")
            ],
        )

    def our_steps(self, variant: str, processes: int = 1, replicas: int = 1) -> list[dict[str, Any]]:
        """The rows of our metrics.jsonl, in stock's names."""
        name, load = f"ours-{self.call}-{self.runs}", self.load
        self.runs += 1
        launcher = "cpu" if self.cpu else "one_gpu" if processes == 1 else "ddp"
        steps = self.options.warm + self.options.steps
        keys: dict[str, Any] = {"train.max_steps": steps, "train.save_steps": steps}
        keys |= {"train.per_device_train_batch_size": load.group}
        keys |= {"train.gradient_accumulation_steps": load.completions // load.group // processes}
        words = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{launcher}.yaml"]
        words += ["--num_processes", processes, "--main_process_port", MEETING_PORT + self.runs % 20]
        words += ["tests/gpu/bench/recipe.py", *self.flags(name, None, replicas)]
        words += [f"--{key}={value}" for key, value in (keys | levers(variant)).items()]
        metrics = self.work / f"run-{name}" / "metrics.jsonl"
        return self.steps_of(name, words, lambda log: read_metrics(metrics))

    def steps_of(self, name: str, words: list, read: Any) -> list[dict[str, Any]]:
        """Run a side; `Failed` only when no counted step was finished."""
        child, wanted = Child(name, words, self.work), self.options.warm + self.options.steps
        self.children.append(child)
        deadline = time.time() + min(self.options.side_s, max(1.0, self.left))
        try:
            while child.process.poll() is None:
                if self.options.cut and len(read(child.log)) >= wanted:
                    break
                if time.time() > deadline:
                    raise Failed(f"{name} was still running after {time.time() - child.started:.0f} s")
                time.sleep(0.2)
            else:
                child.wait(1)
        except Failed as error:
            if len(read(child.log)) <= self.options.warm:
                raise Failed(f"{error}\n{child.end_of_log()}") from None
            self.say(f"cut short: {error}")
        finally:
            child.kill()
            self.children.remove(child)
        self.say(f"{name}: {time.time() - child.started:.0f} s")
        return read(child.log)

    def figures(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """Medians of the steps that count."""
        counted = [one for one in steps if one["number"] > self.options.warm]
        if not counted:
            raise Failed(f"{len(steps)} steps, none after the first {self.options.warm}")
        wrong = {one["completion_tokens"] for one in counted} - {sum(self.load.lengths)}
        problem = f"{sorted(wrong)} completion tokens, {sum(self.load.lengths)} were wanted" if wrong else None
        found = {name: statistics.median(one.get(name, 0.0) for one in counted) for name in PHASES}
        tokens, flops = self.load.tokens, step_flops(self.shape, self.load)
        busy = found["update"] + found["logps"]
        found |= {"steps": len(counted), "update_tok_s": tokens / found["update"], "all": counted}
        # Behind the update the sampler works longer than the trainer waits.
        sampling = statistics.median(one["generate"] + one.get("hidden", 0.0) for one in counted)
        found |= {"rollout_tok_s": sum(self.load.lengths) / sampling if sampling else 0.0}
        found |= {"mfu": flops / busy / PEAK_FLOPS, "peak_gib": max(one["peak_gib"] for one in counted)}
        return found | {"k3": counted[-1].get("k3"), "problem": problem}

    def close(self) -> None:
        """End everything that this call started."""
        for child in [*self.children]:
            child.kill()
        for name, server in self.servers.items():
            try:
                server.stop()
            except Exception as error:
                self.say(f"stopping the {name} server: {type(error).__name__}: {error}")
        self.watch.running = False


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Our steps in stock's names; the first has no step before it to be timed from, so its own seconds count."""
    if not file.is_file():
        return []
    rows, found = [json.loads(line) for line in file.read_text().splitlines()], []
    for place, row in enumerate(rows):
        parts = row["seconds"]
        step = row["time"] - rows[place - 1]["time"] if place else parts["step"]
        one = {"number": row["step"], "step": step, "generate": parts["rollout"] - parts["sync"]}
        one |= {"sync": parts["sync"], "logps": parts.get("reference", 0.0), "update": parts["update"]}
        one |= {"peak_gib": max(row["peak_gib"].values()), "completion_tokens": row["completion_tokens"]}
        one |= {
            "hidden": parts.get("rollout_hidden", 0.0),
            "k3": row["sampler_k3"],
            "seconds": parts,
            "kl": row["kl"],
            "grad_norm": row["grad_norm"],
        }
        found.append(one)
    return found


def table(rows: list[dict[str, Any]], earlier: Path | None) -> None:
    """Every row, and its ratio to the mean of stock's."""
    stock = [row for row in rows if row["side"] == "stock" and "step" in row]
    if not stock and earlier:
        stock = [row for row in json.loads(earlier.read_text())["rows"] if row["side"] == "stock" and "step" in row]
    base_s = statistics.mean(row["step"] for row in stock) if stock else None
    base_gib = statistics.mean(row["peak_gib"] for row in stock) if stock else None
    width = max([len(row["side"]) for row in rows] + [4])
    print(
        f"\n{'side':<{width}} {'step s':>8}{'x stock':>8}{'gen':>7}{'sync':>6}{'refs':>7}{'upd':>7}{'roll tok/s':>11}"
        f"{'upd tok/s':>10}{'mfu':>6}{'trainer':>8}{'x stock':>8}{'card 0':>8}{'server':>8}{'k3':>9}"
    )

    def gib(value: float | None) -> str:
        return f"{value:8.2f}" if value is not None else f"{'-':>8}"

    for row in rows:
        if "step" not in row:
            print(f"{row['side']:<{width}}  {row.get('error', '').splitlines()[-1][:140]}")
            continue
        faster = f"{base_s / row['step']:8.2f}" if base_s else f"{'-':>8}"
        smaller = f"{row['peak_gib'] / base_gib:8.2f}" if base_gib else f"{'-':>8}"
        phases = f"{row['generate']:7.2f}{row['sync']:6.2f}{row['logps']:7.2f}{row['update']:7.2f}"
        speed = f"{row['rollout_tok_s']:11,.0f}{row['update_tok_s']:10,.0f}{row['mfu']:6.1%}"
        k3 = f"{row['k3']:9.1e}" if row["k3"] is not None else f"{'-':>9}"
        memory = gib(row["peak_gib"]) + smaller + gib(row["card_gib"]) + gib(row["server_gib"])
        note = f"  {row['steps']} steps" + (f", {row['problem']}" if row["problem"] else "")
        print(f"{row['side']:<{width}} {row['step']:8.2f}{faster}{phases}{speed}{memory}{k3}{note}")


def compare(bench: Bench) -> int:
    """Stock and the variants, in turn; the number of rows that were wanted."""
    options = bench.options
    with_stock = options.stock is None
    bench.prepare(with_stock)
    if options.variants and "ours" not in bench.broken:
        bench.start_ours()
        if bench.cpu or not with_stock or "stock" in bench.broken:
            with bench.going_on("ours"):
                bench.wait_ours()
    sides = (["stock"] if with_stock else []) + options.variants
    for _ in range(options.rounds):
        for side in sides:
            bench.run(side)
    return options.rounds * len(sides)


def scale(bench: Bench) -> int:
    """The first variant with more trainers and with more replicas; trainers take the first cards, replicas the last.

    Where cards are short a card has both: they work in turn, so seconds stand, memory does not.
    """
    variant, cards = (bench.options.variants or ["default"])[0], max(1, len(bench.watch.now))
    pairs = [(t, r) for t, r in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 3)) if max(t, r) <= cards]
    bench.prepare(False)
    for trainers, replicas in pairs:
        name = f"{trainers} trainers, {replicas} replicas"
        row: dict[str, Any] = {"side": name, "load": bench.options.load, "trainers": trainers, "replicas": replicas}
        flags = bench.flags(f"scaling-{bench.call}-{trainers}-{replicas}", [*range(cards - replicas, cards)], replicas)
        try:
            if bench.left < (0 if bench.cpu else 120):
                raise Failed(f"{bench.left:.0f} s were left, 120 are needed")
            bench.servers = {"ours": OurServer(bench.work, flags, f"scaling-{trainers}-{replicas}")}
            bench.servers["ours"].wait(min(READY_S, bench.left))
            bench.say(f"{replicas} replicas are ready")
            row |= bench.figures(bench.our_steps(variant, trainers, replicas))
            row |= {"server_gib": None, "card_gib": None}
        except Failed as error:
            row["error"] = str(error)
        finally:
            if bench.servers:
                bench.servers.pop("ours").stop()
        bench.add(row)
    first = next((row for row in bench.rows if "step" in row), None)
    for row in bench.rows if first else []:
        if "step" in row:
            update = row["update_tok_s"] / first["update_tok_s"] / row["trainers"]
            rollout = row["rollout_tok_s"] / first["rollout_tok_s"] / row["replicas"]
            print(f"{row['side']}: update efficiency {update:.0%}, rollout efficiency {rollout:.0%}")
    return len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", choices=("compare", "scaling"), default="compare")
    parser.add_argument("--load", choices=WORKS, default="A", help="work A, B or C")
    parser.add_argument("--variants", nargs="*", default=[], help=f"of {', '.join(VARIANTS)}, joined by +")
    parser.add_argument("--stock", type=Path, help="an earlier --out with stock's rows, instead of running stock")
    parser.add_argument("--rounds", type=int, default=1, help="times that the sides alternate")
    parser.add_argument("--warm", type=int, default=1, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_step"), help="kept: model, base, logs")
    parser.add_argument("--limit_s", type=float, default=570, help="stop after this, with a table of what is there")
    parser.add_argument("--side_s", type=float, default=300, help="longest time of one row")
    parser.add_argument("--cut", action="store_true", help="end a side after its last step: no checkpoint, no hash")
    parser.add_argument("--rehearse", action="store_true", help="a tiny shape on a CPU, weights not sent by stock")
    parser.add_argument("--out", type=Path, required=True, help="JSON with every number, written after each row")
    options = parser.parse_args()
    options.out = options.out.resolve()
    for variant in options.variants:
        if unknown := [name for name in variant.split("+") if "=" not in name and name not in VARIANTS]:
            parser.error(f"unknown levers {', '.join(unknown)} in {variant}; there are {', '.join(VARIANTS)}")
    if options.stock and not options.stock.is_file():
        parser.error(f"--stock {options.stock} does not exist")
    os.environ.setdefault("OMP_NUM_THREADS", "1" if options.rehearse else "4")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that what was started is ended
    bench = Bench(options)
    bench.work.mkdir(parents=True, exist_ok=True)
    bench.watch.start()
    time.sleep(1)
    wanted = None
    try:
        wanted = compare(bench) if options.part == "compare" else scale(bench)
    except Failed as error:
        bench.say(f"stopped: {error}")
    finally:
        table(bench.rows, options.stock)
        sys.stdout.flush()
        bench.close()
    good = sum("step" in row and not row["problem"] for row in bench.rows)
    bench.say(f"{good} of {wanted if wanted is not None else '?'} rows, {options.out}")
    raise SystemExit(good != wanted)


if __name__ == "__main__":
    main()
