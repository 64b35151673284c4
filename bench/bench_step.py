"""Two cards: whole GRPO steps of stock TRL against the recipe, lever by lever, on the same lengths.

    python bench/bench_step.py --load A --variants plain fp8+liger+shared --out A.json
    python bench/bench_step.py --loads B C --variants default default+both --out BC.json
    python bench/bench_step.py --load A --variants default+overlap --stock A.json --out A2.json  # no stock again
    python bench/bench_step.py --load A --stock_sides stock+one --variants default+one --out one.json  # one card
    python bench/bench_step.py --loads A B --rounds 3 --stock_sides stock+both+none@A stock+both+none+micro=4@B \
        --variants default+both --out best.json  # stock's fastest setting on the same two cards
    python bench/bench_step.py --variants both both+policy.quant_cfg=nvfp4a16+server.weights=bf16 --out qat.json
    python bench/bench_step.py --part scaling --cards 4 --out scaling.json
    python bench/bench_step.py --part prepare --out x.json  # only write model and base, for calls side by side
    python bench/bench_step.py --rehearse --out x.json  # the same path on a CPU, without NCCL

An 8B shape with random weights, 250-token prompts, groups of 8, beta .01, LoRA of rank 16 on all linear layers; the
trainer on GPU 0, both servers on GPU 1. With `both` in a variant, each card runs a trainer process and a replica: the
replicas of GPU 0 and 1 then run from the start, and other variants use only the one on GPU 1. With `one`, both are on
GPU 0. Work A: 128 completions of 1,024 tokens. B: 128 of log-normal lengths, median 400, sigma .8, cut at 2,048. C:
128 of 4,096. D: 32 of 4,096. A plugin in all vLLM servers fixes the lengths (bench_lengths.py).

Stock: TRL 1.16, BF16, `vllm serve` as `trl vllm-serve` starts it, micro-batch 8, gradient checkpointing, as in TRL's
defaults. `--stock_sides` adds rows in other settings, words joined by +: `none` without checkpointing, `micro=4` with
that micro-batch, `both` and `one` in TRL's colocated mode, with a process and its vLLM on each card or on GPU 0,
`share=.3` with that vllm_gpu_memory_utilization (else the least that holds weights and KV cache of the process's
completions, servers.py); stock+both+none@AD is for works A and D. Ratios are to `stock`, or to the first of stock's
rows if it did not run. Ours: the recipe's main() under accelerate with a reward that random text can earn, NF4, FP8
server with remerge. A variant is levers of workload.py joined by +, or written key=value. `plain` turns every lever
off, `default` is the configuration's own default, and plain@BC runs for works B and C only. `auto` is train.recompute
auto, for cards of 80 GB, where `none` does not fit (84 GiB); with `both` KV cache for half of the completions leaves
more of such a card, server.kv_cache_gib=14 for work A, and server.sleep=true nearly all of it, for the time that a
replica takes to sleep and wake. `both+overlap` trains and samples at once on both; under CUDA's multi-process
service `yield` runs the replica's kernels before the trainer's and `sms=50` keeps the trainer's to 50 % of the card's
multiprocessors. With server.tensor_parallel=2 both cards have one replica. A variant's server.* keys and
policy.quant_cfg, which runs grpo_qat.py, also apply to its servers: a variant with other values waits for servers of
its own. --ours gives keys of all our rows and servers, such as server.kv_cache=fp8. With --rounds the sides alternate,
and a second table has the medians of the rounds. --warm steps, whose completions end at --warm_tokens, come first and
do not count; nor does one more step of `overlap`, whose batch was generated behind a slow first step. Figures are
medians of the others. `step` is wall-clock from the end of a step to the end of the next, `gen` the trainer's wait for
completions, `refs` the forwards without gradients, `upd` forward, backward and optimizer, for our rows everything
else; tok/s of rollout and update are over gen and upd, with a shared prompt counted for each of its completions. `mfu`
is the useful operations (workload.py) over refs + upd and 989 TFLOP/s. `trainer` is torch's peak of a process,
including vLLM in TRL's colocated mode; `card 0` is the driver's figure for that card (with `both` or `one` in any
variant, including a replica); `server` is what a server took of its card when ready. Stock's rows come first; its
server then ends in the last round, and in every round if another row needs its memory. Our replicas start after
stock's colocated rows, and from the second round on stay up beside those that left enough of the card free.

It stops at --limit_s, ends what it started, and prints the rows so far. Exit 1 when a row failed or was left out.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent / "step"))

from memory_child import SHAPES, nvidia_smi, parameters
from servers import (
    MEETING_PORT,
    READY_S,
    SHARE,
    CardWatch,
    Child,
    Failed,
    OurServer,
    StockServer,
    card,
    colocated_share,
    run_flags,
    server_flags,
    write_lengths,
    write_plugin,
)
from step_table import PHASES, efficiencies, figures, read_metrics, read_rows, table
from workload import LEVERS, TINY_WORKS, WORKS, Work

from kit.core.run_directory import write_json

OFF = {"policy.compute": "plain", "policy.kernels": "torch", "train.recompute": "full", "rollout.overlap": "false"}
OFF |= {"train.micro_batch_tokens": "null", "train.optimizer": "adamw_torch", "train.recompute_offload": "false"}
VARIANTS = {"plain": {}, **LEVERS, "overlap": {"rollout.overlap": "true"}, "auto": {"train.recompute": "auto"}}
VARIANTS |= {name: {} for name in ("default", "both", "one", "yield")}
# Words of a variant, as the environment of its trainer
MPS = {"yield": "CUDA_MPS_CLIENT_PRIORITY", "sms": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}
SERVED = ("server.", "policy.quant_cfg=")  # keys that a run shares with its servers
SHARED = {"both": 2, "one": 1}  # cards that train and sample in turn
SCALING = {
    2: [(1, [1]), (2, [1]), (1, [0, 1]), (2, [0, 1])],
    4: [(1, [1]), (2, [1, 2]), (4, [1, 2, 3]), (4, [0, 1, 2, 3])],
}
STOCK_SETTINGS = {"none": None, "both": None, "one": None, "micro": int, "share": float}  # and what a value is
SPARE_GIB = 4  # kept free on a card that the trainer shares: its context, a replica's needs during a sync, and what
# the recipe expects of a replica above what it takes when ready (3 were .4 too few for work C on 80 GB)
ASLEEP_GIB = 6  # what a replica with server.sleep is given while the trainer updates: context, graphs, workspaces
LEAST_S = {"stock": 100.0, "ours": 60.0}  # a side is not started with less time left


def levers(variant: str) -> dict[str, str]:
    """Configuration keys of a variant."""
    names = variant.split("+")
    keys = {} if "default" in names else dict(OFF)
    for name in names:
        key, is_key, value = name.partition("=")
        if key in MPS:
            continue
        keys |= {key: value} if is_key else VARIANTS[name]
    return keys


def stock_settings(side: str) -> dict[str, str]:
    """Settings of a side of stock, `ValueError` if it is none: stock+both+micro=4@A is both and micro 4."""
    stock, *words = side.partition("@")[0].split("+")
    found = {name: value for name, _, value in (word.partition("=") for word in words)}
    if stock != "stock" or not found.keys() <= STOCK_SETTINGS.keys():
        raise ValueError(f"{side} is not stock with settings of {', '.join(STOCK_SETTINGS)}")
    for name, value in found.items():
        kind = STOCK_SETTINGS[name]
        if (kind is None) == bool(value):
            raise ValueError(f"{side}: {name} takes {'no value' if kind is None else 'a value, e.g. micro=4'}")
        if kind:
            kind(value)
    return found


def served_keys(variant: str) -> list[str]:
    """The keys (KEY=VALUE) that also apply to a variant's servers."""
    return [name for name in variant.partition("@")[0].split("+") if name.startswith(SERVED)]


def cards_each(keys: list[str]) -> int:
    """Cards of a replica, by keys (KEY=VALUE) of its server."""
    return int(dict(one.split("=", 1) for one in keys).get("server.tensor_parallel", 1))


class Bench:
    """Options, servers and rows of one invocation."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.started = options, time.time()
        self.work: Path = options.work.resolve()
        self.loads: dict[str, Work] = {
            name: (TINY_WORKS if options.rehearse else WORKS)[name] for name in options.loads
        }
        self.shape = SHAPES["tiny" if options.rehearse else "8b"]
        self.cpu, self.rows, self.children = options.rehearse, [], []
        self.servers: dict[str, Any] = {}
        self.served: list[str] = []  # keys that our server was started with
        self.broken: dict[str, str] = {}  # sides that cannot run, and why; the other one continues
        self.server_gib: dict[str, float | None] = {}
        self.known_gib: dict[tuple[str, ...], float | None] = {}  # of our servers, by the keys they were started with
        self.peaks: dict[tuple[str, str], float] = {}  # GiB of the card that stock's colocated rows took
        self.watch = CardWatch()
        self.runs, self.call = 0, int(self.started)  # the work directory also holds the runs of other calls

    @property
    def cards(self) -> list[int]:
        """Cards of our replicas over all rows: GPU 1, GPU 0, or both. On a CPU, the numbers of the replicas."""
        if self.options.part == "scaling":
            return [*range(self.options.cards)]
        return sorted({number for variant in self.options.variants for number in replicas_of(variant)}) or [1]

    def flags(self, name: str, load: Work, cards: list[int] | None = None) -> list[str]:
        """Command line of one of our runs that uses the replicas on some cards."""
        asked = [*self.options.ours, *self.served]
        each, loads = cards_each(asked), [*self.loads.values()]
        served = server_flags(self.work, loads, self.shape, cards or self.cards, self.cpu, each)
        return run_flags(self.work, load, name, served | dict(one.split("=", 1) for one in asked))

    def serve(self, keys: list[str]) -> None:
        """Launch our server with these keys in place of the running one, without waiting for it."""
        if "ours" in self.servers:
            self.servers.pop("ours").stop()
            self.server_gib.pop("ours", None)
        self.served = keys
        if tuple(keys) in self.known_gib:  # so a trainer on its cards need not wait until it is ready
            self.server_gib["ours"] = self.known_gib[tuple(keys)]
        self.servers["ours"] = OurServer(self.work, self.flags("server", self.largest))

    @property
    def largest(self) -> Work:
        return max(self.loads.values(), key=lambda load: load.prompt + load.longest)

    @property
    def left(self) -> float:
        """Seconds left before the limit, minus a reserve for ending the servers."""
        return self.started + self.options.limit_s - 25 - time.time()

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.started:.0f} s] {text}", flush=True)

    def child(self, name: str, words: list, limit_s: float, **more: str) -> Child:
        """Run a command to completion; raise `Failed` if it fails."""
        child = Child(name, words, self.work, **more)
        self.children.append(child)
        try:
            child.wait(min(limit_s, max(1.0, self.left)))
        finally:
            self.children.remove(child)
        self.say(f"{name}: {time.time() - child.started:.0f} s")
        return child

    def prepare(self, with_stock: bool) -> None:
        """Write the model, start stock's server, write the dequantized base meanwhile, then launch our server."""
        write_plugin(self.work)
        write_lengths(self.work, self.largest)
        if not (self.work / "model" / "COMPLETE").is_file():
            shape = "tiny" if self.cpu else "8b"
            words = ["bench/step/model.py", "--out", self.work / "model", "--shape", shape]
            self.child("model", [*words, "--prompt", self.largest.prompt], 200)
        asks = with_stock and not all(map(shared_cards, self.options.stock_sides))
        if asks:
            self.serve_stock()
        if self.wants_ours and not (self.work / "base" / "manifest.json").is_file():
            words = ["-m", "merge", "base", *self.flags("base", self.largest)]
            with self.going_on("ours"):
                self.child("base", words, 200, CUDA_VISIBLE_DEVICES="" if self.cpu else str(card(0)))
        if asks:
            self.wait_stock()
        colocated = with_stock and any(map(shared_cards, self.options.stock_sides))
        if (
            self.options.part != "prepare"
            and self.wants_ours
            and "ours" not in self.broken
            and self.has_room
            and not colocated
        ):
            # It gets ready during stock's first step, which does not count, or while our first trainer imports.
            self.serve(served_keys((self.options.variants or [""])[0]))

    @property
    def has_room(self) -> bool:
        """Whether enough memory is free on our replicas' cards for vLLM to start."""
        cards = [number for number in self.cards if number < len(self.watch.totals)]
        return all(self.watch.totals[one] * (1 - SHARE) > self.watch.now[one] for one in cards)

    def serve_stock(self) -> None:
        self.servers["stock"] = StockServer(self.work, [*self.loads.values()], None if self.cpu else 1, self.shape)

    def wait_stock(self) -> None:
        with self.going_on("stock"):
            self.servers["stock"].wait(min(READY_S, self.left))
            # Only of its first start: ours may be running when it comes back.
            self.server_gib.setdefault("stock", self.grown(1))
            self.say("the stock server is ready")

    @contextlib.contextmanager
    def going_on(self, side: str) -> Iterator[None]:
        """Confine a failure in the block to one side."""
        try:
            yield
        except Failed as error:
            self.broken[side] = str(error)
            self.say(f"{side}: {error}")

    @property
    def wants_ours(self) -> bool:
        return bool(self.options.variants) or self.options.part != "compare"

    def grown(self, number: int) -> float | None:
        """GiB of a card in use now minus the least since the call began, when another call's may have been ending."""
        now, least = self.watch.now, self.watch.least
        return now[number] - least[number] if number < min(len(now), len(least)) else None

    def wait_ours(self) -> None:
        if "ours" not in self.server_gib:
            self.servers["ours"].wait(min(READY_S, self.left))
            self.note_ours()

    def note_ours(self) -> None:
        """Record our server's memory once it is ready and stock's, which takes more when weights arrive, has ended;
        `Failed` if ours ended."""
        if {"ours", "stock"} & self.servers.keys() != {"ours"} or "ours" in self.server_gib:
            return
        if self.servers["ours"].is_ready:
            self.server_gib["ours"] = self.known_gib[tuple(self.served)] = self.grown(self.cards[-1])
            self.say("our server is ready")

    def make_room(self, side: str, load: str) -> None:
        """Stop our server if a colocated row of stock needs its memory, or has not shown yet what it needs."""
        if self.cpu or "ours" not in self.servers:
            return
        ours, needed = self.server_gib.get("ours"), self.peaks.get((side, load))
        if ours is None or needed is None or ours + needed + SPARE_GIB > min(self.watch.totals):
            self.servers.pop("ours").stop()
            self.server_gib.pop("ours", None)
            time.sleep(1)  # until the card's memory has been sampled again

    def run(
        self, side: str, load: str, trainers: int = 1, cards: list[int] | None = None, name: str | None = None
    ) -> None:
        """Add one row: a side's steps, or its error. Its files go into a directory of its own. Ours runs on the first
        `trainers` cards and uses the replicas of `cards`."""
        trainers, cards = shared_cards(side) or trainers, cards or replicas_of(side)
        replicas = len(cards) // cards_each([*self.options.ours, *served_keys(side)])
        row: dict[str, Any] = {"side": name or side, "load": load, "trainers": trainers, "replicas": replicas}
        kind = "stock" if side.startswith("stock") else "ours"
        try:
            needs_server = kind == "ours" or not shared_cards(side)
            if kind in self.broken and needs_server:
                raise Failed(self.broken[kind])
            if self.left < (0 if self.cpu else LEAST_S[kind]):
                raise Failed(f"{self.left:.0f} s were left, {LEAST_S[kind]:.0f} are needed")
            if kind == "ours" and ("ours" not in self.servers or served_keys(side) != self.served):
                self.serve(served_keys(side))
            # A batch generated behind a short step is not hidden, so an overlapped row has no short steps.
            first_tokens = None if self.warm(side) > self.options.warm else self.options.warm_tokens
            write_lengths(self.work, self.loads[load], self.options.warm, first_tokens)
            self.watch.reset()
            steps = self.stock_steps(side, load) if kind == "stock" else self.our_steps(side, load, trainers, cards)
            if not (counted := [one for one in steps if one["number"] > self.warm(side)]):
                raise Failed(f"{len(steps)} steps, none after the first {self.warm(side)}")
            row |= figures(counted, self.loads[load], self.shape, trainers)
            server = self.server_gib.get(kind) if needs_server else None
            row |= {"server_gib": server, "card_gib": self.watch.peak(0)}
            if not needs_server and self.watch.peaks and "ours" not in self.servers:
                self.peaks[side, load] = max(self.watch.peaks)
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
            self.say(
                f"{row['load']} {row['side']}: {parts} s; {row['update_tok_s']:,.0f} tok/s, {row['peak_gib']:.2f} GiB"
            )
        options = self.options
        head = {"card": nvidia_smi("name"), "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
        head |= {"lengths": {name: load.lengths for name, load in self.loads.items()}, "limit_s": options.limit_s}
        write_json(options.out, head | {"rows": self.rows})

    def warm(self, side: str) -> int:
        """Steps of a row that do not count. The batch of an overlapped run's second step was generated behind the
        slow first step, so the second step would wait too little."""
        return self.options.warm + ("overlap" in side.partition("@")[0].split("+"))

    def steps(self, side: str, load: str) -> int:
        """Steps of a row, including those that do not count."""
        counted = self.options.steps
        return self.warm(side) + (counted[self.options.loads.index(load)] if len(counted) > 1 else counted[0])

    def stock_steps(self, side: str, load: str) -> list[dict[str, Any]]:
        """Run stock and return its rows, also those of a run that was cut short."""
        name, steps = f"stock-{self.call}-{self.runs}", self.steps(side, load)
        self.runs += 1
        words = ["bench/step/stock_step.py", "--model", self.work / "model", "--url", StockServer.url]
        settings, work = stock_settings(side), self.loads[load]
        words += ["--load", load, "--steps", steps, "--recompute", "none" if "none" in settings else "full"]
        words += ["--micro", settings["micro"]] if "micro" in settings else []
        words += ["--rehearse"] if self.cpu else []
        # TRL spreads a model over every GPU that it sees.
        more = {} if self.cpu else {"CUDA_VISIBLE_DEVICES": str(card(0))}
        if processes := shared_cards(side):
            prefix, more = self.launcher(processes)
            words = [*prefix, *words, "--colocate"]
            if self.cpu:
                more["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
            else:
                least = colocated_share(self.shape, parameters("8b"), work, processes, min(self.watch.totals))
                words += ["--share", settings.get("share", least)]
        return self.steps_of(name, words, steps, read_rows, **more)

    def launcher(self, processes: int) -> tuple[list, dict[str, str]]:
        """Words that launch a script in this many processes, on the first cards, and its environment."""
        port, more = MEETING_PORT + self.runs % 20, {"GLOO_SOCKET_IFNAME": "lo"}
        if self.cpu:
            more["ACCELERATE_USE_CPU"] = "true"
        if self.cpu and processes > 1:  # accelerate starts several processes on a CPU by MPI
            return ["-m", "torch.distributed.run", "--nproc_per_node", processes, "--master_port", port], more
        name = "cpu" if self.cpu else "one_gpu" if processes == 1 else "ddp"
        words = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{name}.yaml"]
        words += ["--gpu_ids", card(0)] if name == "one_gpu" else []  # that file names card 0
        return [*words, "--num_processes", processes, "--main_process_port", port], more

    def our_steps(self, variant: str, load_name: str, trainers: int, cards: list[int]) -> list[dict[str, Any]]:
        """Run ours and return the rows of its metrics.jsonl, under stock's names."""
        name, load = f"ours-{self.call}-{self.runs}", self.loads[load_name]
        self.runs += 1
        steps = self.steps(variant, load_name)
        keys: dict[str, Any] = {"train.max_steps": steps, "train.save_steps": steps}
        keys |= {"train.per_device_train_batch_size": load.group}
        keys |= {"train.gradient_accumulation_steps": load.completions // load.group // trainers}
        if shared := set(range(trainers)) & set(cards):
            self.wait_ours()  # its memory on the cards is known then
            if not self.cpu:
                # Not what is free now: the previous run may still be releasing its memory.
                least = min(self.watch.totals[number] for number in shared)
                replica = ASLEEP_GIB if "server.sleep=true" in served_keys(variant) else self.server_gib["ours"]
                keys["train.max_gpu_gib"] = int(least - replica - SPARE_GIB)
        words, more = self.launcher(trainers)
        for word, _, value in (one.partition("=") for one in variant.split("+")):
            if word in MPS:
                more[MPS[word]] = value or "1"  # priority 1 is below normal
        words += ["bench/step/recipe.py", *self.flags(name, load, cards)]
        words += [f"--{key}={value}" for key, value in (keys | levers(variant)).items()]
        metrics = self.work / f"run-{name}" / "metrics.jsonl"
        return self.steps_of(name, words, steps, lambda log: read_metrics(metrics), self.note_ours, **more)

    def steps_of(
        self, name: str, words: list, wanted: int, read: Any, look: Any = lambda: None, **more: str
    ) -> list[dict[str, Any]]:
        """Run a side, polling it; raise `Failed` only if no counted step finished."""
        child = Child(name, words, self.work, **more)
        self.children.append(child)
        deadline = time.time() + min(self.options.side_s, max(1.0, self.left))
        try:
            while child.process.poll() is None:
                if self.options.cut and len(read(child.log)) >= wanted:
                    break
                if time.time() > deadline:
                    raise Failed(f"{name} was still running after {time.time() - child.started:.0f} s")
                look()
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


def shared_cards(side: str) -> int:
    """Number of cards, from the first, on which a side trains and samples in turn; 0 if each has its own card."""
    return max(SHARED.get(name, 0) for name in side.partition("@")[0].split("+"))


def replicas_of(variant: str) -> list[int]:
    """Cards of the replicas that a variant uses."""
    return [*range(shared_cards(variant))] or [1]


def compare(bench: Bench) -> int:
    """Run stock and the variants, in turn; return the number of rows wanted."""
    options = bench.options
    with_stock = options.stock is None
    bench.prepare(with_stock)
    shares = any(map(shared_cards, options.variants))  # a trainer then needs the memory of stock's server
    for number in range(options.rounds):
        is_last = number == options.rounds - 1
        if with_stock:
            if "stock" not in bench.servers and stock_rows(options, colocated=False):
                bench.serve_stock()
                bench.wait_stock()
            for side, load in stock_rows(options, colocated=False):
                bench.run(side, load)
            colocated = stock_rows(options, colocated=True)
            if (is_last or shares or colocated) and "stock" in bench.servers:
                bench.servers.pop("stock").stop()
                time.sleep(1)  # until the card's memory has been sampled again
            for side, load in colocated:
                bench.make_room(side, load)
                bench.run(side, load)
        for variant, load in rows(options):
            bench.run(variant, load)
    wanted = len(stock_rows(options, False)) + len(stock_rows(options, True)) if with_stock else 0
    return options.rounds * (len(rows(options)) + wanted)


def stock_rows(options: argparse.Namespace, colocated: bool) -> list[tuple[str, str]]:
    """(side, load) of stock's rows, in order: those with its server, or the colocated ones, which need the server's
    memory."""
    sides = [side for side in options.stock_sides if bool(shared_cards(side)) == colocated]
    only = {side: side.partition("@")[2] for side in sides}
    return [(side, load) for load in options.loads for side in sides if load in (only[side] or load)]


def rows(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(variant, load) of our rows, in order."""
    named = [variant.partition("@") for variant in options.variants]
    return [(variant, load) for variant, _, only in named for load in options.loads if load in (only or load)]


def scale(bench: Bench) -> int:
    """Run the first variant with ever more trainers, on the first cards, and replicas, on other cards as far as
    there are enough. A trainer's speed does not depend on the replicas, so a row shows two numbers."""
    variant = (bench.options.variants or ["default"])[0]
    bench.prepare(False)
    bench.wait_ours()  # its start is not part of the first row's time
    pairs = SCALING[bench.options.cards]
    for load in bench.options.loads:
        for trainers, cards in pairs:
            bench.run(variant, load, trainers, cards, f"{trainers} trainers, {len(cards)} replicas")
    efficiencies(bench.rows)
    return len(pairs) * len(bench.options.loads)


def write_only(bench: Bench) -> int:
    """Write the model and the dequantized base, for calls of this `--work`, or of others that link to them."""
    bench.prepare(False)
    if bench.broken:
        raise Failed("; ".join(bench.broken.values()))
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", choices=("compare", "scaling", "prepare"), default="compare")
    parser.add_argument("--load", "--loads", dest="loads", nargs="+", choices=WORKS, default=["A"])
    parser.add_argument("--variants", nargs="*", default=[], help=f"of {', '.join(VARIANTS)}, joined by +")
    parser.add_argument("--stock", type=Path, help="an earlier --out with stock's rows, instead of running stock")
    parser.add_argument("--stock_sides", nargs="*", default=["stock"], help="its rows, e.g. stock+both+none@A")
    parser.add_argument("--rounds", type=int, default=1, help="times that the sides alternate")
    parser.add_argument("--warm", type=int, default=1, help="steps before those that count")
    parser.add_argument("--warm_tokens", type=int, help="end the completions of these steps here")
    parser.add_argument("--steps", type=int, nargs="+", default=[3], help="that count; one number, or one a load")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_step"), help="kept: model, base, logs")
    parser.add_argument("--limit_s", type=float, default=570, help="stop after this, with a table of what is there")
    parser.add_argument("--side_s", type=float, default=300, help="longest time of one row")
    parser.add_argument(
        "--ours", nargs="+", default=[], metavar="KEY=VALUE", help="configuration of all our rows and of our server"
    )
    parser.add_argument("--cards", type=int, choices=SCALING, default=2, help="of --part scaling")
    parser.add_argument("--cut", action="store_true", help="end a side after its last step: no checkpoint, no hash")
    parser.add_argument("--rehearse", action="store_true", help="a tiny shape on a CPU, weights not sent by stock")
    parser.add_argument("--out", type=Path, required=True, help="JSON with every number, written after each row")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if wrong := [one for one in options.ours if "=" not in one]:
        parser.error(f"--ours {wrong[0]} is not KEY=VALUE, e.g. server.kv_cache=fp8")
    for side in options.stock_sides:
        try:
            stock_settings(side)
        except ValueError as error:
            parser.error(f"--stock_sides {error}")
    for variant in options.variants:
        names = variant.partition("@")[0].split("+")
        if unknown := [name for name in names if "=" not in name and name not in VARIANTS]:
            parser.error(f"unknown levers {', '.join(unknown)} in {variant}; there are {', '.join(VARIANTS)}")
    if len(options.steps) not in (1, len(options.loads)):
        parser.error(f"--steps names {len(options.steps)} numbers for {len(options.loads)} loads")
    if options.stock and not options.stock.is_file():
        parser.error(f"--stock {options.stock} does not exist")
    return options


def main() -> None:
    options = read_options()
    os.environ.setdefault("OMP_NUM_THREADS", "1" if options.rehearse else "4")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that started processes are ended
    bench = Bench(options)
    bench.work.mkdir(parents=True, exist_ok=True)
    bench.watch.start()
    time.sleep(1)
    wanted = None
    try:
        wanted = {"compare": compare, "scaling": scale, "prepare": write_only}[options.part](bench)
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
