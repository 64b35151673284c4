"""Measure one deployed endpoint on a run's held-out problems: does it serve what was evaluated?

    python -m eval endpoint --url http://127.0.0.1:8000 --run runs/tiny
    python -m eval endpoint --url https://models.example/v1 --model tiny-fp8 --run runs/tiny --cell grpo/fp8

Works with any OpenAI-compatible server, checked as README.md says ("Backends"). If the run's own evaluation holds the
deployed cell, measured on the same problems in the same way, the two are compared problem by problem.
Exits 1 if the endpoint is shown to be worse than that cell, or if its completions are outside the gate's limits.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

from eval import report, stats
from eval.artifacts import check_formats
from eval.asked import evaluation_config
from eval.backends import check_backend
from eval.cells import meta_file, read_records, records_file, write_cell
from eval.compare import decided_scores, points
from eval.episodes import episodes_of
from eval.hygiene import findings, limits_of, rates
from eval.options import add_configuration, add_problem_options, command_parser
from eval.problems import held_out, problems_hash
from eval.record import Record
from eval.result import measurement
from eval.run import answer_pool, ask_settings, scored_cell, versions
from eval.score import summarize
from eval.server_backend import Endpoint, ask_server, parse_cells
from eval.tasks import scoring_of
from kit.core.config.schema import Config, DataConfig
from kit.core.errors import CHECK_FAILED, DONE, BadInput
from kit.core.file_kinds import CELL
from kit.core.run_directory import RunDir, write_record
from kit.core.run_files import read_object

NAME = "endpoint"
# Keys of data that shape a problem's prompt.
PROMPT = ("system_prompt", "prompt_suffix", "chat_template_kwargs", "format")


def main(argv: list[str]) -> int:
    """Measure, compare, write endpoint.json; return 0 unless the endpoint is shown to be worse or out of limits."""
    arguments, overrides = parse_arguments(argv)
    run = RunDir.open(arguments.run, arguments.allow_own_code)
    overrides = [*overrides, "--eval.backend=server"]
    config, training, place = evaluation_config(run, arguments, overrides)
    check_backend("server", config.eval.temperature, config.eval.samples)
    policy, name = deployed_cell(arguments.cell or f"grpo/{config.eval.gate.format}")
    tokenizer = tokenizer_place(run, policy, name, arguments.tokenizer)
    scoring = scoring_of(config)
    problems = held_out(config.data, config.eval.max_problems, training, config.eval.reward)
    asking = ask_settings(config, problems, episodes_of(config, problems, measurement(config)["max_new_tokens"]))
    endpoint = Endpoint(arguments.url, arguments.model, config.rollout.request_timeout_s)
    print(
        f"endpoint {arguments.url}: {len(problems)} problems, tokenizer and chat template of {tokenizer}", flush=True
    )
    folder = (arguments.out or place) / "eval"
    with contextlib.closing(answer_pool(config)) as pool:
        cell = scored_cell(lambda: ask_server(endpoint, tokenizer, asking), problems, asking, pool, scoring)
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"problems": problems_hash(problems), "eval": ways(config), "endpoint": cell.versions}
    identity["reward"] = {"options": config.reward.options}
    identity["data"] = {key: getattr(config.data, key) for key in PROMPT}
    write_cell(folder, NAME, f"{policy}-{name}", cell, identity, None)
    summary = {**summarize(cell.records), **cell.facts()}
    before, why = judged_records(folder, policy, name, identity)
    compared = compare(cell.records, before, config.eval.bootstrap_samples) if before else None
    outside = [found["text"] for found in findings(rates(cell.records), limits_of(config))]
    result = {
        "n": len(problems),
        "problems_hash": identity["problems"],
        "task": arguments.task,
        "scoring": scoring.name,
        "deployed": f"{policy}/{name}",
        "cell": summary,
        "compared": compared,
        "not_compared": None if before else why,
        "out_of_limits": outside,
        "eval": measurement(config),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["python", "-m", "eval", "endpoint", *argv],
    }
    write_record(folder.parent / "endpoint.json", result)
    print(report.cell_line(NAME, name, summary))
    for line in conclusion(result):
        print(line)
    print(
        f"written: {folder.parent / 'endpoint.json'}, completions in {records_file(folder, NAME, f'{policy}-{name}')}"
    )
    sys.stdout.flush()
    worse = compared is not None and compared["interval"][1] < 0
    return CHECK_FAILED if worse or outside else DONE


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    epilog = "Keys of the run's configuration can be given as --group.key value. The API key of the server is taken "
    epilog += "from VLLM_API_KEY or OPENAI_API_KEY."
    parser = command_parser("endpoint", __doc__, "where endpoint.json goes", epilog=epilog)
    parser.add_argument("--url", required=True, help="URL of the server, with or without /v1")
    parser.add_argument("--model", help="the server's name for the model; default the only one that it lists")
    parser.add_argument("--cell", help="what is deployed, as policy/format; default grpo/<eval.gate.format>")
    parser.add_argument("--tokenizer", type=Path, help="directory with the tokenizer; default that of --cell")
    add_problem_options(parser)
    add_configuration(parser)
    return parser.parse_known_args(argv)


def deployed_cell(text: str) -> tuple[str, str]:
    """Parse "grpo/fp8" into ("grpo", "fp8"); `BadInput` if it is not a cell of a matrix."""
    policy, name = next(iter(parse_cells([f"{text}=it"], "cell")))
    check_formats([name])
    return policy, name


def tokenizer_place(run: RunDir, policy: str, name: str, given: Path | None) -> Path:
    """Directory of the tokenizer that the endpoint must have: `given`, the merged checkpoint, or the original one."""
    if given is not None:
        if not given.is_dir():
            raise BadInput(f"--tokenizer {given} is not a directory.")
        return given
    if (run.merged / policy / name / "config.json").is_file():
        return run.merged / policy / name
    from merge.verify import base_directory

    return base_directory(run, weights=False)


def ways(config: Config) -> dict:
    """Settings that must match for two measurements of the same problems to be comparable, whatever generated them."""
    names = ("max_new_tokens", "temperature", "samples", "reward", "reward_threshold", "stop")
    return {name: measurement(config)[name] for name in names}


def judged_records(folder: Path, policy: str, name: str, identity: dict) -> tuple[list[Record], str]:
    """Return the records of the run's own evaluation of the deployed cell, or [] and why they cannot be compared."""
    header, file, cell = meta_file(folder, policy, name), records_file(folder, policy, name), f"{policy}/{name}"
    if not header.is_file() or not file.is_file():
        return [], f"{cell} has not been evaluated (python -m eval)"
    known = read_object(header, CELL)["identity"]
    own = {key: ({"stop": []} | known.get("eval", {})).get(key) for key in identity["eval"]}
    options = known.get("reward", {}).get("options", {})
    plain = dataclasses.asdict(DataConfig()) | known.get("data", {})
    other = [f"data.{key} was {plain[key]!r}" for key, value in identity["data"].items() if plain[key] != value]
    different = {
        "on other problems": known.get("problems") != identity["problems"],
        f"with other settings: {own}": own != json.loads(json.dumps(identity["eval"])),
        f"with other options of rewards: {options}": options != identity["reward"]["options"],
        f"on other prompts: {', '.join(other)}": other,
    }
    if why := next((why for why, differs in different.items() if differs), None):
        return [], f"{cell} was evaluated {why}"
    return read_records(file), ""


def compare(now: list[Record], before: list[Record], samples: int) -> dict:
    """Accuracy of the endpoint minus that of the cell on the same problems: {"difference", "interval", "n", "same"}.

    `same` is the share of completions that are identical, both being greedy or the same sample.
    """
    cells = {("grpo", "after"): now, ("grpo", "before"): before}
    after, earlier = decided_scores(cells, [*cells])
    same = sum(a.completion == b.completion for a, b in zip(now, before, strict=True)) / len(now)
    return {**stats.paired_difference(after, earlier, samples, 0), "n": len(after), "same": same}


def conclusion(result: dict) -> list[str]:
    """Sentences that the comparison and the limits support."""
    lines, found, deployed = [], result["compared"], result["deployed"]
    if found is None:
        lines.append(f"Not compared with the run's evaluation: {result['not_compared']}.")
    else:
        low, high = found["interval"]
        verdict = "worse than" if high < 0 else "better than" if low > 0 else "not shown to differ from"
        lines.append(
            f"The endpoint is {verdict} {deployed} as evaluated: {points(found['difference'], sign=True)} points, 95 "
            f"% interval {points(low)} to {points(high)}, on {found['n']} problems; {points(found['same'])} % of the "
            "completions are the same."
        )
    if result["out_of_limits"]:
        lines.append(f"Outside the gate's limits: {'; '.join(result['out_of_limits'])}.")
    return lines
