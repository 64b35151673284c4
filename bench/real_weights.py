"""One GPU: this kit's claims on a pretrained model: rewards by setting and seed, survival in each format.

    python bench/real_weights.py learn --config recipes/configs/grpo-smollm2_135m-nf4-svamp-1gpu.yaml \\
        --out learn.json
    python bench/real_weights.py judge --work /tmp/real --out judge.json
    python bench/real_weights.py survive --work /tmp/real --out survive.json

`learn` trains every arm with every seed, each with a server of its own, several at once, so its seconds mean nothing.
An arm is a name=KEY=VALUE,KEY=VALUE of --arms, compared with the first. `judge` asks all of these policies and their
bases the held-out problems: BF16 weights of the base that was trained, adapters unmerged, one engine per base.
`survive` merges the runs of the first arm into every format, evaluates them with vLLM (nf4 with transformers) and
runs the gate, all by the kit's own commands. Each part resumes where it was interrupted. Keys of the configuration can
be given as --group.key=value. Tables come last: means over the seeds, 95 % intervals over problems and over seeds
(Student's t).
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from eval.stats import cluster_interval, paired_difference, runs_interval
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed, run_command
from kit.core.formats import FORMATS, TRAINED, check_model
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_json
from kit.train.mismatch import ROUTING_KEYS

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/grpo_qlora.py"
SERVED = "rollout.backend=server"
ARMS = [
    f"nf4={SERVED}",
    f"bf16 base={SERVED},policy.quantization=none",
    f"fp8 products={SERVED},policy.compute=fp8",
    f"overlapped={SERVED},rollout.overlap=true",
    f"adapter sync={SERVED},rollout.sync=adapter",
    "in process=rollout.backend=in_process",
]
OTHER = ["--max_problems", "1319", "--eval.max_new_tokens=160"]  # for another task, in full
ENDS = 10  # steps at each end of a run
FIGURES = ("sampler_k3", "sampler_delta_mean", "kl", "entropy", "completion_length", *ROUTING_KEYS)
# Servers that start at the same time cannot measure their own share of the card.
SHARED = {"server.gpu_memory_utilization": 0.05, "server.kv_cache_gib": 2}


def read_arm(text: str) -> tuple[str, dict[str, str]]:
    """(name, keys) of an arm; `BadInput` unless it is name=KEY=VALUE,…"""
    name, _, keys = text.partition("=")
    found = dict(part.partition("=")[::2] for part in keys.split(",") if part)
    if not name or not keys or not all("." in key and value for key, value in found.items()):
        raise BadInput(f"--arms {text!r} is not name=KEY=VALUE,KEY=VALUE, such as {ARMS[1]!r}.")
    return name, found


class Work:
    """The folder of all runs, and their shared settings."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.options, self.folder = options, options.work
        self.begun, self.lock = 0, threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = self.folder / "call.json"
        if options.config is not None:
            arms = options.arms or ARMS
            write_json(
                stored, {"config": options.config, "arms": arms, "seeds": options.seeds, "overrides": overrides}
            )
        if not stored.is_file():
            raise BadInput(f"{self.folder} holds no runs. Train them first: real_weights.py learn --config RUN.yaml.")
        call = read_json(stored)
        self.config, self.seeds, self.overrides = call["config"], call["seeds"], call["overrides"]
        self.arms = dict(map(read_arm, call["arms"]))

    def run(self, arm: str, seed: int) -> RunDir:
        return RunDir(self.folder / f"{arm.replace(' ', '-')}-{seed}")

    def flags(self, arm: str, seed: int = 0, place: int = 0) -> list[str]:
        """Command line of a run."""
        run = self.run(arm, seed).path
        keys: dict[str, Any] = {"run.name": run.name, "run.seed": seed, "run.output_dir": run} | SHARED
        keys |= {"train.gpus": f"[{self.card(place)}]", "server.gpus": f"[{self.card(place)}]"}
        keys |= {"rollout.server_urls": f"['http://127.0.0.1:{self.options.port + place}']"}
        keys |= {"server.base": self.folder / f"base-{self.arms[arm].get('policy.quantization', 'nf4')}"}
        keys |= self.arms[arm]
        return ["--config", self.config, *self.overrides, *(f"--{key}={value}" for key, value in keys.items())]

    def card(self, place: int) -> str:
        """The GPU of a run or a command, assigned in turn."""
        return self.options.cards[place % len(self.options.cards)]

    def command(self, name: str, words: list[str], accepted: tuple[int, ...] = (0,), place: int | None = None) -> int:
        """Run one command line with its output in logs/<name>.log; `CheckFailed` quotes the end of the log."""
        with self.lock:
            self.begun += 1
            place = self.begun if place is None else place
        log, started = self.folder / "logs" / f"{name.replace('/', '-')}.log", time.time()
        log.parent.mkdir(exist_ok=True)
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        environment["CUDA_VISIBLE_DEVICES"] = self.card(place)
        with open(log, "w") as file:
            words = [sys.executable, *words]
            code = subprocess.run(words, cwd=ROOT, env=environment, stdout=file, stderr=file).returncode
        print(f"{name}: exit code {code}, {time.time() - started:.0f} s", flush=True)
        if code not in accepted:
            raise CheckFailed(f"{name} ended with {code}: {' | '.join(log.read_text().splitlines()[-6:])[-900:]}")
        return code

    def all(self, jobs: Iterable[tuple[Callable[..., Any], tuple]]) -> list[str]:
        """Run jobs, `--jobs` at a time; return the errors."""
        with ThreadPoolExecutor(self.options.jobs) as pool:
            made = [pool.submit(work, *given) for work, given in jobs]
        failed = [str(error) for one in made if (error := one.exception()) is not None]
        print("\n".join(failed), flush=True)
        return failed


def is_trained(run: RunDir, steps: int) -> bool:
    return run.metrics_file.is_file() and len(run.metrics_file.read_text().splitlines()) == steps


def learn(work: Work) -> list[str]:
    """Train the runs that are not trained yet, and print the table. Bases are written first, since all runs of a kind
    share one; meanwhile the recipe checks every arm, which is cheaper than servers for runs that fail at once."""
    steps = load_config(work.config, work.overrides).train.max_steps
    kinds = {work.arms[arm].get("policy.quantization", "nf4"): arm for arm in reversed(work.arms)}
    bases = [arm for kind, arm in kinds.items() if not (work.folder / f"base-{kind}").exists()]
    checked = [arm for arm in work.arms if not work.run(arm, 0).path.exists()]
    failed = work.all(
        [(work.command, (f"base-{arm}", ["-m", "merge", "base", *work.flags(arm)])) for arm in bases]
        + [(work.command, (f"check-{arm}", [RECIPE, *work.flags(arm), "--dry_run"])) for arm in checked]
    )
    if failed:
        return failed
    wanted = [(arm, seed) for seed in range(work.seeds) for arm in work.arms]

    def train(arm: str, seed: int, place: int) -> None:
        run, flags = work.run(arm, seed), work.flags(arm, seed, place)
        name, words = run.path.name, [RECIPE, *flags, *(["--overwrite"] if run.path.exists() else [])]
        if work.arms[arm].get("rollout.backend") != "server":
            work.command(name, words, place=place)
            return
        with ThreadPoolExecutor(1) as pool:  # the trainer loads its model while the server starts, then waits for it
            words_of_server = ["-m", "launch.server", *flags, "--detach"]
            server = pool.submit(work.command, f"{name}-server", words_of_server, place=place)
            try:
                work.command(name, words, place=place)
            finally:
                server.exception()
                work.command(f"{name}-stop", ["-m", "launch.server", "stop", *flags], (0, 1))

    todo = [
        (arm, seed, place) for place, (arm, seed) in enumerate(wanted) if not is_trained(work.run(arm, seed), steps)
    ]
    failed = work.all((train, one) for one in todo)
    found = {arm: [facts(work.run(arm, seed)) for seed in range(work.seeds)] for arm in work.arms}
    write_json(work.options.out, {"command": sys.argv, "runs": found, "failed": failed})
    table_of_rewards(found)
    if any(run.get("whole", {}).get(ROUTING_KEYS[0]) for runs in found.values() for run in runs):
        table_of_routing(found)
    return failed


def facts(run: RunDir) -> dict[str, Any]:
    """Figures of one run's metrics, {} if it has none; k3 and |Δlogp| over its last steps."""
    if not run.metrics_file.is_file():
        return {}
    rows = run.metrics()
    last = rows[-ENDS:]

    def mean(key: str, some: list[dict]) -> float | None:
        values = [row[key] for row in some if row.get(key) is not None]
        return statistics.mean(values) if values else None

    return {
        "rewards": [row["reward"] for row in rows],
        "first": mean("reward", rows[:ENDS]),
        "last": mean("reward", last),
        **{key: mean(key, last) for key in FIGURES},
        "truncated": [mean("truncated_fraction", rows[:ENDS]), mean("truncated_fraction", last)],
        "zero_spread": mean("zero_spread_fraction", last),
        "whole": {key: mean(key, rows) for key in ("sampler_k3", "corrected_token_fraction", *ROUTING_KEYS)},
        "largest_delta": max((row["sampler_delta_max"] or 0.0 for row in rows), default=0.0),
        "heldout": [row["heldout_accuracy"] for row in rows if row.get("heldout_accuracy") is not None],
        "step_s": statistics.median(row["seconds"]["step"] for row in rows),
    }


def table_of_rewards(found: dict[str, list[dict]]) -> None:
    first = next(iter(found))
    print(
        "| arm | reward, first and last ten steps by seed | last ten | minus the first arm | k3 | mean Δlogp |", end=""
    )
    print(" other experts: pairs of token and layer | tokens |")
    print("|---" * 8 + "|")
    for arm, runs in found.items():
        done = {seed: run for seed, run in enumerate(runs) if run}
        if not done:
            print(f"| {arm} | failed | | | | | | |")
            continue
        change = "–"
        both = [seed for seed in done if found[first][seed]]
        if arm != first and len(both) > 1:
            change = interval_of([done[seed]["last"] - found[first][seed]["last"] for seed in both], "+.3f")
        shown = ", ".join(f"{run['first']:.3f} → {run['last']:.3f}" for run in done.values())
        mean = statistics.mean(run["last"] for run in done.values())
        figures = [
            f"{statistics.mean(values):.1e}" if (values := [run[key] for run in done.values() if run[key]]) else "–"
            for key in ("sampler_k3", "sampler_delta_mean", *ROUTING_KEYS)
        ]
        print(f"| {arm} | {shown} | {mean:.3f} | {change} | {' | '.join(figures)} |")


def table_of_routing(found: dict[str, list[dict]]) -> None:
    """Print how far sampler and policy were apart over all steps, for mixtures of experts."""
    print(
        "\n| arm | k3 | largest Δlogp by seed | corrected tokens | other experts: pairs | tokens |\n"
        + "|---" * 6
        + "|"
    )
    for arm, runs in found.items():
        done = [run for run in runs if run]
        if not done:
            continue
        means = {
            key: statistics.mean(values)
            if (values := [run["whole"][key] for run in done if run["whole"][key]])
            else None
            for key in done[0]["whole"]
        }
        shown = {key: "–" if value is None else f"{value:.1e}" for key, value in means.items()}
        largest = ", ".join(f"{run['largest_delta']:.1f}" for run in done)
        cells = [
            shown["sampler_k3"],
            largest,
            shown["corrected_token_fraction"],
            *(shown[key] for key in ROUTING_KEYS),
        ]
        print(f"| {arm} | {' | '.join(cells)} |")


def interval_of(values: list[float], form: str) -> str:
    """Mean and interval over the seeds, formatted."""
    low, high = runs_interval(values)
    return f"{format(statistics.mean(values), form)} [{format(low, form)}, {format(high, form)}]"


def judge(work: Work) -> list[str]:
    """Held-out accuracies of every run and its base: greedy, and sampled as in training."""
    kinds: dict[str, list[str]] = {}
    for arm, keys in work.arms.items():
        kinds.setdefault(keys.get("policy.quantization", "nf4"), []).append(arm)
    script = [str(Path(__file__)), "engine", "--work", str(work.folder), "--out"]
    failed = work.all(
        (work.command, (f"engine-{kind}", [*script, str(work.folder / f"judged-{kind}.json"), "--kind", kind]))
        for kind in kinds
    )
    found: dict[str, Any] = {}
    for kind, arms in kinds.items():
        if not (file := work.folder / f"judged-{kind}.json").is_file():
            continue
        shares = read_json(file)
        base = shares.pop("base")
        found[f"base, {kind}"] = {way: summary({0: base[way]}) for way in base}
        for arm in arms:
            runs = {seed: shares[f"{arm}|{seed}"] for seed in range(work.seeds) if f"{arm}|{seed}" in shares}
            if runs:
                found[arm] = {way: summary({seed: run[way] for seed, run in runs.items()}, base[way]) for way in base}
    write_json(work.options.out, {"command": sys.argv, "accuracies": found, "failed": failed})
    print(
        "| policy | greedy | sampled | gain, greedy | over seeds | gain, sampled | over seeds |\n" + "|---" * 7 + "|"
    )
    for name, ways in found.items():
        cells = [ways[way]["shown"] for way in ("greedy", "sampled")]
        cells += [ways[way].get(key, "–") for way in ("greedy", "sampled") for key in ("gain", "seeds")]
        print(f"| {name} | {' | '.join(cells)} |")
    return failed


def summary(runs: dict[int, list[float]], base: list[float] | None = None) -> dict[str, Any]:
    """Accuracy of several seeds over the same problems; `runs` holds the share of right answers per problem."""
    import numpy as np

    values = np.array([*runs.values()])
    mean = values.mean(0)
    low, high = cluster_interval(mean, len(values))
    found: dict[str, Any] = {"by_seed": values.mean(1).tolist(), "problems": len(mean)}
    found["shown"] = f"{100 * mean.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    if base is not None:
        change = paired_difference(mean, np.array(base), 10_000, 0)
        low, high = change["interval"]
        found["gain"] = f"{100 * change['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        each = [100 * float((row - np.array(base)).mean()) for row in values]
        found["seeds"] = interval_of(each, "+.1f") if len(each) > 1 else "–"
    return found


def engine(work: Work) -> list[str]:
    """Child process of `judge`: one engine with a base and the adapters of all its runs."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from eval.generate import finish, render_prompts
    from eval.run import answer_pool
    from eval.score import Answered
    from eval.tasks import scoring_of
    from kit.data.problems import chat_messages, load_problems
    from kit.policy.load import adapted_layers, check_base, load_tokenizer

    kind, options = work.options.kind, work.options
    arms = [arm for arm, keys in work.arms.items() if keys.get("policy.quantization", "nf4") == kind]
    config = load_config(work.config, work.flags(arms[0])[2:])
    tokenizer, problems = load_tokenizer(config), load_problems(config.data, "eval")
    asked = [chat_messages(config.data, problem) for problem in problems]
    texts = render_prompts(tokenizer, asked, config.data.chat_template_kwargs)
    prompts = [{"prompt_token_ids": ids} for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    limit = config.rollout.max_completion_length
    targets = sorted({name.rpartition(".")[2] for name in adapted_layers(config, check_base(config))})
    llm = LLM(
        model=str(work.folder / f"base-{kind}"), dtype="bfloat16", max_num_seqs=512, enforce_eager=True,
        max_model_len=config.rollout.max_prompt_length + limit + 64, gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=6 << 30, generation_config="vllm", enable_lora=True,
        max_lora_rank=config.policy.lora_rank, lora_target_modules=targets,
    )  # fmt: skip
    ways = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=limit, detokenize=False),
        "sampled": SamplingParams(
            n=options.samples, temperature=config.rollout.temperature, max_tokens=limit, seed=0, detokenize=False
        ),
    }
    steps = config.train.max_steps
    adapters = {f"{arm}|{seed}": work.run(arm, seed).adapter_dir(steps) for arm in arms for seed in range(work.seeds)}
    found: dict[str, Any] = {}
    scoring = scoring_of(config)
    with contextlib.closing(answer_pool(config)) as pool:
        for number, (name, folder) in enumerate({"base": None, **adapters}.items()):
            if folder is not None and not folder.is_dir():
                continue
            request = LoRARequest(name, number, str(folder)) if folder else None
            found[name] = {}
            for way, sampling in ways.items():
                outputs = llm.generate(prompts, sampling, lora_request=request, use_tqdm=False)
                answers = [
                    Answered(
                        finish(tokenizer, list(one.token_ids), [tokenizer.eos_token_id], limit).text, problem, chat
                    )
                    for output, problem, chat in zip(outputs, problems, asked, strict=True)
                    for one in output.outputs
                ]
                right = [bool(one.correct) for one in scoring.judge(answers, pool)]
                count = len(right) // len(problems)
                found[name][way] = [statistics.mean(right[at : at + count]) for at in range(0, len(right), count)]
            print(name, {way: round(statistics.mean(shares), 3) for way, shares in found[name].items()}, flush=True)
    write_json(options.out, found)
    return []


def survive(work: Work) -> list[str]:
    """Merge, evaluate and gate the first arm's runs in every format; print the table of gains and survival."""
    arm, options = next(iter(work.arms)), work.options
    steps = load_config(work.config, work.overrides).train.max_steps
    runs = [run for seed in range(work.seeds) if is_trained(run := work.run(arm, seed), steps)]
    options.formats = storable(options.formats, load_config(work.config, work.overrides).model.source)
    merged = [name for name in options.formats if name != "nf4"]
    shared = ["--server.gpu_memory_utilization=0.06", "--server.kv_cache_gib=3", "--server.enforce_eager=true"]
    shared.append("--eval.backend=vllm")  # which the gate compares with what was measured

    def merge(run: RunDir) -> None:
        words = ["-m", "merge", "--run", str(run.path), "--format", *merged, "--overwrite"]
        words += ["--awq_python", options.awq_python] if options.awq_python else []
        work.command(f"{run.path.name}-merge", words, (0, 1))  # 1: a format was rejected, the others exist

    def evaluate(run: RunDir, formats: list[str], task: list[str], accepted: tuple[int, ...] = (0,)) -> None:
        words = ["-m", "eval", "--run", str(run.path), "--formats", *formats, "--reuse"]
        name = "-".join([run.path.name, "eval", *task[1:2], *(formats if len(formats) < 3 else ["all"])])
        work.command(name, [*words, *task, *shared], accepted)

    failed = work.all((merge, (run,)) for run in runs if not (run.merged / "grpo").exists())
    tasks: dict[str, list[str]] = {"": []}
    for task, _, file in (one.partition("=") for one in options.tasks):
        tasks[task] = ["--task", task, "--data", file, *OTHER]
    there = {run.path.name: [name for name in options.formats if stored(run, name)] for run in runs}
    if runs:  # every run has the same base, so the first one's cells of it serve the others, and `--reuse` checks them
        failed += work.all((evaluate, (runs[0], [name], [])) for name in there[runs[0].path.name])
    for run in runs[1:]:
        share_base_cells(runs[0], run)
    failed += work.all((evaluate, (run, [name], [])) for run in runs[1:] for name in there[run.path.name])
    own = [(run, there[run.path.name], []) for run in runs]
    failed += work.all((evaluate, one) for one in own)
    failed += work.all(
        (work.command, (f"{run.path.name}-gate-{name}", ["-m", "eval", "gate", "--run", str(run.path),
                        f"--eval.gate.format={name}", *shared], (0, 1)))
        for run in runs for name in merged if (run.merged / "grpo" / name).is_dir()
    )  # fmt: skip
    found: dict[str, Any] = {}
    for task, words in tasks.items():
        judged = runs if not task else runs[:1]
        if task and runs:
            wanted = [name for name in options.task_formats if name in there[runs[0].path.name]]
            failed += work.all((evaluate, (runs[0], [name], words)) for name in wanted)
            failed += work.all([(evaluate, (runs[0], wanted, words))])
        found[task or "own"] = [survival(run, task) for run in judged]
        write_json(options.out, {"command": sys.argv, "tasks": found, "failed": failed})
        table_of_formats(task or "own", found[task or "own"], options.formats)
    return failed


def table_of_formats(task: str, seeds: list[dict], formats: list[str]) -> None:
    done = [one for one in seeds if one]
    print(f"\n{task}: accuracy in percent, {len(done)} seeds, {done[0]['n'] if done else 0} problems")
    print(
        "| format | base | GRPO by seed | gain | over seeds | survival | over seeds | promoted |\n" + "|---" * 8 + "|"
    )
    for name in formats:
        print(row_of(name, [one for one in done if name in one["gain"]]), flush=True)


def stored(run: RunDir, name: str) -> bool:
    """Whether a run has checkpoints of a format to evaluate; those of nf4 are its base and its adapter."""
    return name == "nf4" or (run.merged / "grpo" / name).is_dir()


def share_base_cells(first: RunDir, other: RunDir) -> None:
    """Copy the measured cells of the base from one run to another."""
    (other.path / "eval").mkdir(parents=True, exist_ok=True)
    for file in (first.path / "eval").glob("base-*.*"):
        shutil.copy2(file, other.path / "eval" / file.name)


def storable(formats: list[str], model: str) -> list[str]:
    """The formats that have a layout for a local model's layers; an unsupported one would end the whole merge."""
    facts, found = read_json(Path(model) / "config.json"), []
    for name in formats:
        try:
            if name in TRAINED:
                check_model(TRAINED[name], facts)
            found.append(name)
        except BadInput as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


def survival(run: RunDir, task: str) -> dict[str, Any]:
    """Results that `python -m eval` wrote, and the gate's verdict by format."""
    file = (run.path / f"eval-{task}" if task else run.path) / "eval.json"
    if not file.is_file():
        return {}
    found = read_json(file)
    kept = {key: found[key] for key in ("n", "gain", "gain_survival")}
    kept["matrix"] = {
        policy: {name: {"accuracy": cell["accuracy"], "interval": cell["interval"]} for name, cell in cells.items()}
        for policy, cells in found["matrix"].items()
    }
    manifests = {name: run.merged / "grpo" / name / "manifest.json" for name in found["matrix"]["grpo"]}
    facts = {name: read_json(place) for name, place in manifests.items() if place.is_file()}
    kept["promoted"] = {name: one.get("promoted") for name, one in facts.items()}
    kept["retained"] = {name: one.get("retained_update") for name, one in facts.items()}
    kept["kl"] = {name: (one.get("verify") or {}).get("mean_kl") for name, one in facts.items()}
    return kept


def row_of(name: str, seeds: list[dict]) -> str:
    if not seeds:
        return f"| {name} | – | | | | | | |"
    base = statistics.mean(one["matrix"]["base"][name]["accuracy"] for one in seeds)
    grpo = " ".join(f"{100 * one['matrix']['grpo'][name]['accuracy']:.1f}" for one in seeds)
    cells = [name, f"{100 * base:.1f}", grpo]
    for kind in ("gain", "gain_survival"):
        values = [100 * one[kind][name]["difference"] for one in seeds if name in one[kind]]
        shown = " ".join(
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in (change["difference"], *change["interval"])))
            for one in seeds if (change := one[kind].get(name))
        )  # fmt: skip
        cells += [shown or "–", interval_of(values, "+.1f") if len(values) > 1 else "–"]
    cells.append(" ".join({True: "yes", False: "no"}.get(one["promoted"].get(name), "–") for one in seeds))
    return f"| {' | '.join(cells)} |"


PARTS = {"learn": learn, "judge": judge, "engine": engine, "survive": survive}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("part", choices=PARTS, metavar="learn | judge | survive")
    parser.add_argument("--kind", help=argparse.SUPPRESS)  # for engine, which judge starts
    parser.add_argument("--config", help="YAML of the runs, of learn")
    parser.add_argument("--arms", nargs="+", help="name=KEY=VALUE,… of learn; default: the shipped ones")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=6, help="commands at once; default: 6")
    parser.add_argument("--port", type=int, default=8500, help="of the first server of learn; default: 8500")
    parser.add_argument("--samples", type=int, default=4, help="of judge: sampled completions per problem; default: 4")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of survive")
    parser.add_argument("--awq_python", help="of survive: see python -m merge --help")
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK=FILE", help="of survive: others, of the first seed's policy"
    )
    parser.add_argument("--task_formats", nargs="+", choices=FORMATS, default=["bf16", "fp8"], help="of --tasks")
    parser.add_argument("--cards", nargs="+", default=["0"], help="GPUs that commands are spread over; default: 0")
    parser.add_argument("--work", type=Path, default=Path("/tmp/real"), help="the folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON with every number")
    options, overrides = parser.parse_known_args()
    if failed := PARTS[options.part](Work(options, overrides)):
        raise CheckFailed(f"{len(failed)} commands failed")


if __name__ == "__main__":
    run_command(main)
