"""Run lm-evaluation-harness on the same checkpoint and the same problems, and compare its score with ours.

    python -m eval lm_eval --run runs/tiny --policy grpo --format bf16     # runs it, as `make lm_eval` installed it
    python -m eval lm_eval --run runs/tiny --format fp8 --url http://127.0.0.1:8000 --model NAME    # a vLLM server
    python -m eval lm_eval --run runs/tiny --format bf16 --results FILE    # only compares what it wrote before

Its two tasks are in eval/lm_eval: kit_gsm8k prompts as the harness's own gsm8k does, kit_problems in the policy's own
words. The problems are those that eval.json was measured on. Writes lm_eval.json beside eval.json: both scores with
95 % Wilson intervals, the difference on the same problems, and where the protocols differ.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval import samples, stats
from eval.artifacts import POLICIES, artifact
from eval.cells import read_records, records_file
from eval.compare import points
from eval.options import add_configuration, command_parser
from eval.problems import held_out, problems_hash
from eval.result import read_result, run_config
from kit.core.config.schema import DataConfig
from kit.core.errors import DONE, BadInput, CheckFailed
from kit.core.file_kinds import GENERATION_CONFIG, HARNESS_RESULTS, HARNESS_SAMPLES, LM_EVAL, TOKENIZER_CONFIG
from kit.core.run_directory import RunDir, file_hash, manifest_as_written, write_record
from kit.core.run_files import numbered_lines, read_object, read_optional
from kit.data.problems import TEXT_FORMATS, Problem, chat_messages

ROOT = Path(__file__).parents[1]
TASKS = ("kit_gsm8k", "kit_problems")
INSTALLED = ROOT / ".venv-lm_eval" / "bin" / "lm_eval"
SHOTS = 5  # as in the harness's own gsm8k


@dataclass(frozen=True)
class Score:
    """One score of the harness: a task with one of its filters; `right` maps problem ids to 0 or 1."""

    task: str
    filter: str
    value: float
    n: int
    shots: int
    right: dict[str, float] | None = None

    @property
    def interval(self) -> list[float]:
        return list(stats.wilson(self.value * self.n, self.n))


@dataclass(frozen=True)
class Results:
    """A results file of the harness: its scores, and the parts of its protocol in which ours may differ."""

    file: Path
    scores: list[Score]
    raw: dict


@dataclass(frozen=True)
class Measured:
    """A cell of eval.json with the problems it was measured on."""

    run: RunDir
    folder: Path
    policy: str
    format: str
    result: dict
    checkpoint: Path
    problems: list[Problem]
    data: DataConfig

    @property
    def cell(self) -> dict:
        return self.result["matrix"][self.policy][self.format]

    @property
    def work(self) -> Path:
        """Folder for the harness's files of this cell."""
        return self.folder.resolve() / "lm_eval" / f"{self.policy}-{self.format}"


def main(argv: list[str]) -> int:
    """Run the harness (or read its results), compare with the cell, write lm_eval.json; return 0 if both exist."""
    arguments, overrides = parse_arguments(argv)
    measured = find_measured(arguments, overrides)
    if arguments.results is None:
        command = harness_command(measured, arguments)
        print(" ".join(map(shlex.quote, command)), flush=True)
        if arguments.dry_run:
            return DONE
        write_problems(measured)
        file = run_harness(command, measured.work)
    else:
        file = newest_results(arguments.results) if arguments.results.is_dir() else arguments.results
    results = read_results(file)
    comparison = compare(measured, results)
    for line in lines(measured, comparison):
        print(line)
    if not arguments.dry_run:
        publish(measured, comparison, ["python", "-m", "eval", "lm_eval", *argv])
    return DONE


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = command_parser("lm_eval", __doc__, "folder that holds eval.json, e.g. of a task")
    parser.add_argument("--policy", choices=POLICIES, default="grpo", help="row of the matrix; default grpo")
    parser.add_argument("--format", help="column of the matrix; default eval.gate.format")
    add_configuration(parser)
    parser.add_argument(
        "--results", type=Path, help="results_*.json of the harness, or a folder with one: do not run it"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: both")
    parser.add_argument(
        "--num_fewshot", type=int, default=SHOTS, help=f"examples of kit_gsm8k; default {SHOTS}, as gsm8k"
    )
    parser.add_argument("--fewshot", type=Path, help="jsonl with worked answers for them; default the training file")
    parser.add_argument("--url", help="a vLLM server that holds the checkpoint, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", help="the server's name for the model; default the checkpoint's path")
    parser.add_argument("--batch_size", type=int, default=16, help="prompts at once; with --url, requests at once")
    parser.add_argument("--lm_eval", type=Path, default=INSTALLED, help="the harness; default that of make lm_eval")
    parser.add_argument("--dry_run", action="store_true", help="check, print the harness's command, write nothing")
    return parser.parse_known_args(argv)


def find_measured(arguments: argparse.Namespace, overrides: list[str]) -> Measured:
    """Return the cell, its checkpoint and its problems, checked to be those of eval.json."""
    run = RunDir.open(arguments.run, arguments.allow_own_code)
    own = run_config(run, overrides, arguments.config)
    name, folder = arguments.format or own.eval.gate.format, arguments.out or run.path
    result = read_result(folder / "eval.json", run)
    if name not in result["matrix"].get(arguments.policy, {}):
        raise BadInput(f"{folder / 'eval.json'} has no cell {arguments.policy}/{name}. Evaluate it: --formats {name}.")
    if name == "nf4":
        raise BadInput("nf4 is measured as base and adapter: there is no checkpoint that the harness could load.")
    if arguments.num_fewshot < 0 or arguments.batch_size < 1:
        raise BadInput(
            f"--num_fewshot must be at least 0 and --batch_size at least 1; they are {arguments.num_fewshot} and "
            f"{arguments.batch_size}."
        )
    checkpoint = artifact(run, arguments.policy, name)
    if (known := result["matrix"][arguments.policy][name].get("artifact_hash")) not in (None, checkpoint.hash):
        raise BadInput(f"{checkpoint.path} is not the checkpoint that was measured ({known}). Evaluate again.")
    data = DataConfig(**result["data"])
    if data.answer_format not in TEXT_FORMATS:
        raise BadInput(f"the harness's gsm8k compares numbers; data.answer_format is {data.answer_format}.")
    how = result["eval"]
    problems = held_out(data, how["max_problems"], own.data, how.get("reward"))
    if problems_hash(problems) != result.get("problems_hash"):
        raise BadInput(f"the held-out problems are no longer those of {folder / 'eval.json'}. Evaluate again.")
    return Measured(run, folder, arguments.policy, name, result, checkpoint.path, problems, data)


def harness_command(measured: Measured, arguments: argparse.Namespace) -> list[str]:
    """The harness's command line for the cell; `BadInput` if it cannot be started."""
    if not arguments.lm_eval.is_file():
        raise BadInput(f"{arguments.lm_eval} does not exist. Make it with: make lm_eval, or name one with --lm_eval.")
    kind, batch, dtype = "hf", arguments.batch_size, _dtype(measured.cell, measured.result)
    where: dict[str, object] = {"pretrained": str(measured.checkpoint.resolve()), "dtype": dtype}
    if arguments.url:
        kind, batch = "local-chat-completions", 1
        where = {
            "model": arguments.model or str(measured.checkpoint),  # as vllm serve names it by default
            "base_url": arguments.url.rstrip("/") + "/v1/chat/completions",
            "num_concurrent": arguments.batch_size,
            "tokenized_requests": False,
            "max_retries": 3,
        }
    metadata = {"problems": str(measured.work / "problems.jsonl")}
    if shots := _shots(measured, arguments):
        metadata["fewshot"] = str(shots)
    command = [str(arguments.lm_eval), "run", "--model", kind]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in where.items())]
    command += ["--tasks", ",".join(arguments.tasks), "--num_fewshot", str(arguments.num_fewshot)]
    command += ["--include_path", str(Path(__file__).parent / "lm_eval"), "--metadata", json.dumps(metadata)]
    command += ["--apply_chat_template", "--batch_size", str(batch)]
    command += ["--gen_kwargs", f"max_gen_toks={measured.result['max_new_tokens']}"]
    command += ["--log_samples", "--output_path", str(measured.work)]
    if measured.data.system_prompt:
        command += ["--system_instruction", measured.data.system_prompt]
    return command


def _dtype(cell: dict, result: dict) -> str:
    found = cell.get("compute_dtype") or result.get("compute_dtype") or "auto"
    return found if found in ("float32", "bfloat16", "float16") else "auto"


def _shots(measured: Measured, arguments: argparse.Namespace) -> Path | None:
    """The file of worked examples; by default the run's training file, if it is a jsonl that has them."""
    if not arguments.num_fewshot or "kit_gsm8k" not in arguments.tasks:
        return None
    file = arguments.fewshot
    if file is None:
        data = run_config(measured.run, []).data
        file = Path(data.path or "").expanduser()
        file = file / f"{data.train_split}.jsonl" if file.is_dir() else file
    if file.suffix != ".jsonl" or not file.is_file():
        raise BadInput(
            f"--num_fewshot {arguments.num_fewshot} needs worked examples, and {file} is not a jsonl file of them "
            "(columns question, answer). Name one with --fewshot, or use --num_fewshot 0."
        )
    return file.resolve()


def write_problems(measured: Measured) -> None:
    """Write problems.jsonl, the data set of the harness's tasks: the cell's problems, in order."""
    measured.work.mkdir(parents=True, exist_ok=True)
    partial = measured.work / "problems.jsonl.partial"
    for problem in measured.problems:
        if problem.messages is not None and len(problem.messages) > 1:
            raise BadInput(
                f"{problem.source} is a conversation of {len(problem.messages)} messages, and the harness asks with "
                "one. Measure these problems without it."
            )
    with open(partial, "w", encoding="utf-8") as file:
        for problem in measured.problems:
            prompt = chat_messages(measured.data, problem)[-1]["content"]
            # The harness compares text: SVAMP's 145.0 would make every 145 wrong.
            answer = re.sub(r"(?<=\d)\.0+$", "", problem.gold)
            row = {"problem_id": problem.id, "question": problem.question, "prompt": prompt, "answer": answer}
            file.write(json.dumps(row) + "\n")
    os.replace(partial, measured.work / "problems.jsonl")


def run_harness(command: list[str], folder: Path) -> Path:
    """Run the harness and return the results file it wrote; `CheckFailed` with the end of its log if it fails."""
    log, started = folder / "lm_eval.log", time.time()
    # Nothing is downloaded: problems and checkpoint are local files.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise CheckFailed(f"the harness failed (exit code {done.returncode}); {log} ends with:\n{tail}")
    results = newest_results(folder)
    if results.stat().st_mtime < started - 1:
        raise CheckFailed(f"the harness wrote no results; see {log}.")
    return results


def newest_results(folder: Path) -> Path:
    """The newest results_*.json anywhere in a folder."""
    found = sorted(folder.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise BadInput(f"{folder} holds no results_*.json of the harness.")
    return found[-1]


def read_results(file: Path) -> Results:
    """Read the exact-match scores of a results file, with the answers by problem if its samples file is beside it."""
    raw = read_object(file, HARNESS_RESULTS)
    scores = []
    for task, found in raw["results"].items():
        count = ((raw.get("n-samples") or {}).get(task) or {}).get("effective") or found.get("sample_len")
        right = read_samples(_samples_file(file, task))
        for key, value in found.items():
            metric, _, name = key.partition(",")
            if metric != "exact_match" or not isinstance(value, int | float):
                continue
            if type(count) is not int or count < 1 or not 0 <= value <= 1:
                raise BadInput(f"{file}: {task} has exact_match {value} of {count} samples.")
            shots = (raw.get("n-shot") or {}).get(task, 0)
            scores.append(Score(task, name, float(value), count, shots, right.get(name)))
    if not scores:
        raise BadInput(f"{file} has no exact_match of any task; it has {', '.join(raw['results']) or 'no tasks'}.")
    return Results(file, scores, raw)


def _samples_file(file: Path, task: str) -> Path:
    return file.with_name(f"samples_{task}_{file.stem.removeprefix('results_')}.jsonl")


def read_samples(file: Path) -> dict[str, dict[str, float]]:
    """{filter: {problem id: 0 or 1}} of a samples file; {} without one, or if a task's rows have no problem_id."""
    found: dict[str, dict[str, float]] = {}
    if not file.is_file():
        return found
    for _, row in numbered_lines(file, HARNESS_SAMPLES):
        if "problem_id" not in row["doc"]:
            return {}
        found.setdefault(row["filter"], {})[row["doc"]["problem_id"]] = float(row["exact_match"])
    return found


def compare(measured: Measured, results: Results) -> dict:
    """Our score, each harness score with the difference on the same problems, and where the protocols differ.

    `BadInput` if the harness loaded another checkpoint than the cell's.
    """
    pretrained = (results.raw.get("config") or {}).get("model_args") or {}
    pretrained = pretrained.get("pretrained") if isinstance(pretrained, dict) else None
    if pretrained and Path(pretrained).resolve() != measured.checkpoint.resolve():
        raise BadInput(f"{results.file} measured {pretrained}, the cell is {measured.checkpoint}.")
    cell = measured.cell
    return {
        "policy": measured.policy,
        "format": measured.format,
        "n": len(measured.problems),
        "problems_hash": measured.result["problems_hash"],
        "ours": {"accuracy": cell["accuracy"], "interval": cell["interval"], "strict": cell["strict"]},
        "harness": [
            {
                "task": score.task,
                "filter": score.filter,
                "accuracy": score.value,
                "interval": score.interval,
                "n": score.n,
                "num_fewshot": score.shots,
                "difference": _difference(measured, score),
            }
            for score in results.scores
        ],
        "differences": {task: differences(measured, results, task) for task in {s.task: 0 for s in results.scores}},
        "results": str(results.file),
        "results_hash": file_hash(results.file),
        "versions": {
            "lm_eval": results.raw.get("lm_eval_version"),
            "transformers": results.raw.get("transformers_version"),
        },
    }


def _difference(measured: Measured, score: Score) -> dict | None:
    """The harness's score minus ours on the problems that both decided; None without its samples."""
    if score.right is None:
        return None
    records = read_records(records_file(measured.folder / "eval", measured.policy, measured.format))
    means = samples.problem_means(samples.score_table(records))
    ours = {group[0].problem_id: value for group, value in zip(samples.by_problem(records), means, strict=True)}
    both = [(score.right[key], value) for key, value in ours.items() if key in score.right and value == value]
    if not both:
        return None
    theirs, own = map(list, zip(*both, strict=True))
    found = stats.paired_difference(theirs, own, measured.result["eval"]["bootstrap_samples"], 0)
    only_theirs, only_ours = stats.discordant(theirs, own)
    return {**found, "n": len(both), "only_harness_right": only_theirs, "only_ours_right": only_ours}


def differences(measured: Measured, results: Results, task: str) -> list[str]:
    """Describe where the harness's protocol for a task differs from ours, one sentence each."""
    raw, ours, data = results.raw, measured.result, measured.data
    config = (raw.get("configs") or {}).get(task) or {}
    made = config.get("generation_kwargs") or {}
    said = []
    if shots := (raw.get("n-shot") or {}).get(task):
        turns = " as earlier turns" if raw.get("fewshot_as_multiturn") else ""
        said.append(f"examples: {shots} worked ones before each question{turns}; ours none")
    words, suffix = config.get("doc_to_text"), data.prompt_suffix.strip()
    if words != "{{prompt}}":
        said.append(f"words: {words!r}; ours the question{f' and {suffix!r}' if suffix else ''}")
    for found in config.get("filter_list") or []:
        said.append(
            f"answer ({found.get('name')}): {_rule(found)}, compared as text; ours the last \\boxed{{}}, else #### n, "
            "compared as values"
        )
    temperature = made.get("temperature") or 0.0 if made.get("do_sample") else 0.0
    if temperature != (own := ours.get("temperature") or 0):
        said.append(f"decoding: {_decoding(temperature)}; ours {_decoding(own)}")
    if (limit := made.get("max_gen_toks")) != ours["max_new_tokens"]:
        said.append(f"length: at most {limit or 'its default of'} new tokens; ours {ours['max_new_tokens']}")
    stops = [stop for stop in made.get("until") or [] if stop not in ("</s>", "<|im_end|>")]
    if stops != (texts := (ours.get("eval") or {}).get("stop") or []):
        also = f"also at {', '.join(map(repr, stops))}" if stops else "the model's stop tokens"
        own_stops = f"and {', '.join(map(repr, texts))}" if texts else "alone"
        said.append(f"stops: {also}; ours the model's stop tokens {own_stops}")
    own_settings = _read_optional(measured.checkpoint / "generation_config.json")
    acting = [f"{key} {own_settings[key]}" for key in _ACTS if own_settings.get(key) not in (None, _ACTS[key])]
    if acting:
        said.append(f"settings: the checkpoint's {', '.join(acting)} apply there; ours ignore generation_config.json")
    if raw.get("model_source") == "hf" and raw.get("chat_template") != _template(measured.checkpoint):
        said.append("chat template: not the checkpoint's; ours is")
    defaults = manifest_as_written(measured.checkpoint).get("chat_template_kwargs", {})
    if data.chat_template_kwargs != defaults:
        asked = data.chat_template_kwargs
        said.append(f"chat template's arguments: the checkpoint's defaults {defaults}; ours {asked}")
    if (raw.get("system_instruction") or None) != (data.system_prompt or None):
        said.append("system message: not the same")
    used = str((raw.get("config") or {}).get("model_dtype") or "the server's default").removeprefix("torch.")
    if used != (mine := _dtype(measured.cell, ours)) and mine != "auto":
        said.append(f"computed in {used}; ours in {mine}")
    count = next(score.n for score in results.scores if score.task == task)
    if count != len(measured.problems):
        said.append(f"problems: {count}; ours {len(measured.problems)}")
    return said


def _rule(found: dict) -> str:
    """Describe what a filter takes as the answer."""
    first = (found.get("filter") or [{}])[0]
    which = {0: "the first match of", -1: "the last match of"}.get(first.get("group_select", 0), "a match of")
    return f"{which} {first.get('regex_pattern')}" if first.get("function") == "regex" else str(first.get("function"))


# Keys of generation_config.json that change greedy completions, each with its neutral value.
_ACTS = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0, "min_length": 0, "num_beams": 1}


def _read_optional(file: Path) -> dict:
    return read_optional(file, GENERATION_CONFIG)


def _decoding(temperature: float) -> str:
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"


def _template(checkpoint: Path) -> str | None:
    """The chat template of a checkpoint's files, as transformers saves it."""
    if (file := checkpoint / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    return read_object(checkpoint / "tokenizer_config.json", TOKENIZER_CONFIG).get("chat_template")


def lines(measured: Measured, comparison: dict) -> list[str]:
    """The comparison for the terminal: our score first, then each score of the harness, then the differences."""
    ours = comparison["ours"]
    shown = [_line("ours", ours["accuracy"], ours["interval"], comparison["n"])]
    for score in comparison["harness"]:
        name = f"{score['task']}, {score['filter']}, {score['num_fewshot']} examples"
        line = _line(name, score["accuracy"], score["interval"], score["n"])
        if found := score["difference"]:
            low, high = found["interval"]
            line += f"  minus ours {points(found['difference'], sign=True)}"
            line += f" [{points(low, sign=True)}, {points(high, sign=True)}]"
            line += f", {found['only_harness_right']} only there right, {found['only_ours_right']} only here"
        shown.append(line)
    heading = f"{measured.policy} in {measured.format}, accuracy in percent with 95 % Wilson intervals"
    body = [f"  {task}: {text}" for task, texts in comparison["differences"].items() for text in texts]
    return [heading, *shown, "Where the protocols differ:", *(body or ["  nowhere"])]


def _line(name: str, accuracy: float, interval: Sequence[float], n: int) -> str:
    low, high = interval
    return f"  {name:<44} {points(accuracy):>5} [{points(low):>5}, {points(high):>5}]  of {n}"


def publish(measured: Measured, comparison: dict, command: list[str]) -> None:
    """Write the comparison into lm_eval.json beside eval.json, keeping comparisons of other cells."""
    file = measured.folder / "lm_eval.json"
    cells = read_optional(file, LM_EVAL).get("cells") or {}
    made = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command}
    write_record(file, {"cells": {**cells, f"{measured.policy}/{measured.format}": comparison | made}})
    print(f"written: {file}", flush=True)
