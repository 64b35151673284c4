"""Speculative decoding on real servers, with and without: exactness, accepted drafts, tok/s of 1, 8, 64 completions.

    python -m recipes.real_base --out models/smollm2-135m
    python bench/speculation.py --model models/smollm2-135m --out speculation.json       # one GPU
    python bench/speculation.py --model models/smollm2-135m --cpu --counts 1 4 --tokens 128 --rounds 1 --samples 512
    python bench/speculation.py --model models/qwen3-8b --draft draft_model=models/qwen3-0.6b \
        --variants none 4-2-4 draft_model-4                                              # or eagle3=HEAD, eagle3-4

A server of the kit for each of `--variants` ("none", draft tokens-shortest-longest n-gram, suffix-draft tokens, or
method-draft tokens of a checkpoint in `--draft`) serves the dequantized base in BF16 with a random adapter of 2 % by
remerge. All start together and are measured in turn, each alone. Prompts are made-up word problems that ask for every
step and a check.

- exactness: k3 and mean |Δlogp| of the sampled tokens against transformers on the same weights; greedy tokens against
  the first variant's, and where they part the gap of the two tokens by transformers (kernels round other batch shapes
  otherwise, so only near ties may part); a chi-squared test that the variants' tokens after every beginning of a
  worked problem have one distribution, and the share of drafts that were accepted in it.
- speed: tok/s, accepted drafts and tokens per forward pass of `--counts` completions at once, at temperature 1, of
  prompts of their own or in groups of `--group`.

Prints tables last; exit code 1 if a variant is not exact.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
SESSION, VERSION = "bench", 1
LEAST_P = 1e-4  # of the chi-squared tests
MOST_GAP = 0.25  # nats between two greedy tokens that rounding may swap
ASK = " Solve it step by step. Write down every step with its numbers, then check the result by another way."
STORIES = (
    "{a} packs {x} boxes with {y} apples each and gives {z} apples away. How many apples are left?",
    "A train goes {x} miles an hour for {y} hours, then {z} miles more. How far does it go?",
    "{a} saves {x} dollars a week for {y} weeks and spends {z} dollars. How much money is left?",
    "{a} reads {x} pages a day for {y} days. The book has {z} pages more. How long is the book?",
    "{a} has {x} bags of {y} marbles and {b} has {z} marbles. How many marbles do they have together?",
    "A baker makes {x} trays of {y} rolls and sells {z} of them. How many rolls does the baker keep?",
)
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Finn")


def problems(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        a, b = rng.sample(NAMES, 2)
        numbers = {"x": rng.randrange(6, 40), "y": rng.randrange(3, 13), "z": rng.randrange(5, 18)}
        made.append(STORIES[number % len(STORIES)].format(a=a, b=b, **numbers) + ASK)
    return made


class Variant:
    """A server, measured alone."""

    def __init__(self, name: str, work: Path, options: argparse.Namespace, port: int, share: float):
        from kit.rollout.replica import Replica

        self.name, self.url = name, f"http://127.0.0.1:{port}"
        keys = common_keys(work, options) | {
            "run.output_dir": work / name,
            "run.name": name,
            "rollout.backend": "server",
            "rollout.sync": "remerge",
            "rollout.server_urls": f"['{self.url}']",
            "server.adapter_roots": f"['{work}']",
            "server.base": work / "base",
            "server.weights": "bf16",
            "server.max_num_seqs": max(64, *options.counts),
            "server.kv_cache_gib": options.kv_gib,
            "server.gpu_memory_utilization": share,
            "server.enforce_eager": str(options.cpu).lower(),
        }
        method, _, rest = name.partition("-")
        if method in options.draft:
            keys |= {"server.speculation": method, "server.draft_tokens": rest}
            keys["server.draft_model"] = Path(options.draft[method]).resolve()
        elif method == "suffix":
            keys |= {"server.speculation": method, "server.draft_tokens": rest}
        elif name != "none":
            draft, least, most = name.split("-")
            keys |= {"server.speculation": "ngram", "server.draft_tokens": draft}
            keys |= {"server.ngram_min": least, "server.ngram_max": most}
        self.words = ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]
        self.log = work / f"{name}.log"
        self.replica = Replica(self.url, 600)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with open(self.log, "w") as log:
            command = [sys.executable, "-m", "launch.server", *self.words]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, adapter: Path, base_hash: str) -> None:
        while "\nserving" not in self.log.read_text():
            if self.process.poll() is not None:
                raise SystemExit(f"the server {self.name} ended: {self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        where = {"way": "remerge", "run": "bench", "session": SESSION, "base_hash": base_hash}
        self.replica.info()  # sets remerge up
        self.replica.stage(version=VERSION, path=adapter, is_first=True, **where)
        self.replica.activate(SESSION, VERSION)

    def ask(self, prompt: list[int], tokens: int, temperature: float, n: int = 1) -> list[Any]:
        chosen = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}
        named = {"session": SESSION, "version": VERSION}
        return self.replica.generate("bench", prompt, n=n, max_tokens=tokens, **chosen, **named)[1]

    def complete(self, prompts: list[list[int]], tokens: int, temperature: float, at_once: int, n: int = 1) -> list:
        """Samples of each prompt in order, `at_once` requests at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return [*pool.map(lambda prompt: self.ask(prompt, tokens, temperature, n), prompts)]

    def drafted(self) -> dict[str, int] | None:
        return self.replica.info()["drafted"]


def common_keys(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    keys = {"model.path": options.model.resolve(), "model.dtype": "bfloat16", "data.path": work / "unused"}
    keys |= {"policy.lora_rank": 16, "policy.lora_alpha": 32, "rollout.group_size": 8}
    return keys | {"rollout.max_prompt_length": 512, "rollout.max_completion_length": options.tokens}


def prepare(work: Path, options: argparse.Namespace) -> tuple[Path, str]:
    """Write the dequantized base and a random adapter on it; return the adapter and the base hash."""
    from kit.core.run_directory import read_manifest
    from kit.policy.load import publish_adapter
    from tests.evidence.stock_merge import load_policy

    words = [f"--{key}={value}" for key, value in common_keys(work, options).items()]
    command = [sys.executable, "-m", "merge", "base", "--config", CONFIG, *words, "--out", str(work / "base")]
    if not (work / "base").exists():
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    base_hash = read_manifest(work / "base")["base_hash"]
    adapter = work / "adapter"
    if not adapter.exists():
        model = load_policy(options.model, size=0.02, seed=1, dtype="bfloat16")
        publish_adapter(model, adapter, VERSION, base_hash)
    return adapter, base_hash


def load_reference(work: Path, adapter: Path, device: str) -> Any:
    """The policy by transformers and peft in BF16: the dequantized base with the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(work / "base", dtype="bfloat16")
    return PeftModel.from_pretrained(base, adapter).merge_and_unload().to(device).eval()


def log_probs(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> Any:
    """(T, V) float32 of the completion `ids`."""
    import torch

    with torch.no_grad():
        tokens = torch.tensor([prompt + ids], device=model.device)
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)


def measure_speed(one: Variant, prompts: list[list[int]], options: argparse.Namespace) -> tuple[dict, list]:
    """tok/s and figures of drafts by completions at once, and the samples of the largest number."""
    from kit.rollout import drafts

    found, samples = {}, []
    one.complete(prompts[: max(options.counts)], 16, 1.0, max(options.counts))  # warm
    for count in options.counts:
        tokens, before, started = 0, one.drafted(), time.perf_counter()
        rounds = options.rounds * (4 if count == 1 else 1)
        for number in range(rounds):
            asked, group = max(1, count // options.group), min(count, options.group)
            part = [prompts[(number * asked + place) % len(prompts)] for place in range(asked)]
            made = one.complete(part, options.tokens, 1.0, asked, n=group)
            samples = [(prompt, sample) for prompt, answers in zip(part, made, strict=True) for sample in answers]
            tokens += sum(len(sample.token_ids) for _, sample in samples)
        seconds = time.perf_counter() - started
        figures = drafts.figures({one.url: before}, {one.url: one.drafted()})
        found[count] = {"tok_s": tokens / seconds, "tokens": tokens, "mean_length": tokens / rounds / count} | figures
        print(f"  {count} at once: {found[count]}", flush=True)
    return found, samples


def measure_mismatch(model: Any, samples: list) -> dict[str, float]:
    """k3 and mean |Δlogp| of sampled tokens, as the trainer computes them."""
    import torch

    deltas = []
    for prompt, sample in samples[:32]:
        ids = sample.token_ids.tolist()
        ours = log_probs(model, prompt, ids).gather(-1, torch.tensor(ids, device=model.device)[:, None])[:, 0]
        deltas.append(ours.double().cpu() - torch.tensor(sample.logprobs).double())
    d = torch.cat(deltas)
    return {"k3": (d.exp() - 1 - d).mean().item(), "delta": d.abs().mean().item(), "tokens": len(d)}


def compare_greedy(model: Any, prompts: list[list[int]], first: list[list[int]], other: list[list[int]]) -> dict:
    """Completions that are the same, and the largest gap of log-probs where others part."""
    same, gaps = 0, []
    for prompt, one, two in zip(prompts, first, other, strict=True):
        parting = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
        if parting is None:
            same += one == two
            continue
        row = log_probs(model, prompt, one[: parting + 1])[-1]
        gaps.append((row.max() - row[[one[parting], two[parting]]].min()).item())
    return {"same": same, "of": len(prompts), "largest_gap": max(gaps, default=0.0)}


def seen_tokens(one: Variant, prompt: list[int], samples: int, length: int = 6) -> tuple[dict, int]:
    """{beginning: tokens that followed} of many short completions of a prompt, and how many drafts were accepted."""
    before, seen = one.drafted(), defaultdict(Counter)
    for group in one.complete([prompt] * (samples // 8), length, 1.0, 8, n=8):
        for sample in group:
            ids = tuple(sample.token_ids.tolist())
            for place, token in enumerate(ids):
                seen[ids[:place]][token] += 1
    after = one.drafted()
    return seen, after["accepted"] - before["accepted"] if after else 0


def same_distribution(one: dict, other: dict) -> dict[str, float]:
    """A chi-squared test that two samplers are one: of the tokens after every beginning that both saw often."""
    from scipy.stats import chi2

    statistic, freedom = 0.0, 0
    for begun in one.keys() & other.keys():
        a, b = one[begun], other[begun]
        if min(a.total(), b.total()) < 50:
            continue
        share = a.total() / (a.total() + b.total())
        common = [token for token in a.keys() | b.keys() if (a[token] + b[token]) * min(share, 1 - share) >= 5]
        cells = [(a[token], b[token]) for token in common]
        rest = a.total() - sum(x for x, _ in cells), b.total() - sum(y for _, y in cells)
        cells += [rest] if sum(rest) * min(share, 1 - share) >= 5 else []
        for x, y in cells:
            expected = (x + y) * share, (x + y) * (1 - share)
            statistic += (x - expected[0]) ** 2 / expected[0] + (y - expected[1]) ** 2 / expected[1]
        freedom += max(0, len(cells) - 1)
    return {"chi2": statistic, "freedom": freedom, "p": float(chi2.sf(statistic, freedom)) if freedom else 1.0}


def measure(variants: list[Variant], model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, dict]:
    def render(text: str) -> list[int]:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(asked, add_special_tokens=False)["input_ids"]

    prompts = [render(text) for text in problems(max(64, *options.counts), 0)]
    found: dict[str, dict] = {}
    greedy, seen = {}, {}
    worked = None
    for one in variants:
        print(f"{one.name}:", flush=True)
        speed, samples = measure_speed(one, prompts, options)
        at_once = min(8, max(options.counts))
        made = one.complete(prompts[:16], min(128, options.tokens), 0.0, at_once)
        greedy[one.name] = [sample.token_ids.tolist() for (sample,) in made]
        # The problem with its worked answer before it: what was answered is drafted.
        worked = worked or prompts[0] + greedy[one.name][0][:60] + prompts[0]
        seen[one.name], accepted = seen_tokens(one, worked, options.samples)
        found[one.name] = {"speed": speed, "mismatch": measure_mismatch(model, samples), "accepted_in_test": accepted}
    first = variants[0].name
    for one in variants[1:]:
        found[one.name]["greedy"] = compare_greedy(model, prompts[:16], greedy[first], greedy[one.name])
        found[one.name]["distribution"] = same_distribution(seen[first], seen[one.name])
    return found


def report(found: dict[str, dict], options: argparse.Namespace) -> list[str]:
    """Print the tables; return what is not exact."""
    wrong, (first, *others) = [], found
    heads = f"{'k3':>10}{'|Δlogp|':>10}{'greedy same':>13}{'gap':>7}{'chi2 (dof)':>16}{'p':>8}{'accepted':>10}"
    print(f"\n{'drafts':<16}{heads}")
    for name, row in found.items():
        line = f"{name:<16}{row['mismatch']['k3']:>10.2e}{row['mismatch']['delta']:>10.4f}"
        if name in others:
            greedy, test = row["greedy"], row["distribution"]
            line += f"{greedy['same']:>8} / {greedy['of']:<2}{greedy['largest_gap']:>7.3f}"
            line += f"{test['chi2']:>10.1f} ({test['freedom']}){test['p']:>8.3f}{row['accepted_in_test']:>10}"
            if greedy["largest_gap"] > MOST_GAP:
                wrong.append(f"{name}: greedy tokens part where they are {greedy['largest_gap']:.2f} nats apart")
            if test["p"] < LEAST_P or not test["freedom"]:
                wrong.append(f"{name}: the tokens have another distribution than those of {first} (p {test['p']:.1e})")
            if row["mismatch"]["k3"] > 2 * found[first]["mismatch"]["k3"] + 1e-4:
                wrong.append(
                    f"{name}: k3 is {row['mismatch']['k3']:.1e}, {found[first]['mismatch']['k3']:.1e} without"
                )
        print(line)
    print(
        f"\n{'drafts':<16}"
        + "".join(f"{f'tok/s at {n}':>13}{'x':>6}{'accepted':>10}{'per pass':>10}" for n in options.counts)
    )
    for name, row in found.items():
        line = f"{name:<16}"
        for count in options.counts:
            one, plain = row["speed"][count], found[first]["speed"][count]
            share, per = one["draft_acceptance"], one["tokens_per_forward"]
            line += f"{one['tok_s']:>13.0f}{one['tok_s'] / plain['tok_s']:>6.2f}"
            line += f"{'-' if share is None else f'{share:.0%}':>10}{'-' if per is None else f'{per:.2f}':>10}"
        print(line)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="directory of a chat model")
    parser.add_argument("--work", type=Path, default=Path("/tmp/speculation"))
    parser.add_argument("--variants", nargs="+", default=["none", "4-2-4"], help="the first is compared with")
    parser.add_argument("--draft", nargs="+", default=[], help="checkpoints that draft, as METHOD=DIRECTORY")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 64], help="completions at once")
    parser.add_argument("--group", type=int, default=1, help="completions of a prompt that are asked for together")
    parser.add_argument("--tokens", type=int, default=512, help="longest completion")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8192, help="completions of the distribution test")
    parser.add_argument("--kv_gib", type=float, default=4.0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    options.draft = dict(one.split("=", 1) for one in options.draft)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    from transformers import AutoTokenizer

    started = time.perf_counter()
    options.work.mkdir(parents=True, exist_ok=True)
    adapter, base_hash = prepare(options.work, options)
    share = round(0.8 / len(options.variants), 2)
    variants = [Variant(name, options.work, options, 8100 + at, share) for at, name in enumerate(options.variants)]
    try:
        for one in variants:
            one.start()
        model = load_reference(options.work, adapter, "cpu" if options.cpu else "cuda")
        for one in variants:
            one.wait(adapter, base_hash)
        print(f"{len(variants)} servers after {time.perf_counter() - started:.0f} s", flush=True)
        found = measure(variants, model, AutoTokenizer.from_pretrained(options.model), options)
    finally:
        running = [one.process for one in variants if one.process is not None]
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    wrong = report(found, options)
    print(f"{time.perf_counter() - started:.0f} s", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
