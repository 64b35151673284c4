"""Measure the matrix {base, grpo} x formats on a run's held-out problems; see README.md."""

import argparse
import contextlib
import dataclasses
import itertools
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval import artifacts, compare, report
from eval.artifacts import POLICIES, Sources
from eval.asked import evaluation_config
from eval.backends import Answers, Asking, ask_transformers, check_backend
from eval.cells import Cell, read_cell, write_cell
from eval.episodes import Episodes, close_all, episodes_of
from eval.hygiene import limits_of
from eval.machine import check_vllm, missing_kernel, package_versions, vllm_version
from eval.naming import trained_name
from eval.options import add_configuration, add_problem_options, command_parser
from eval.power import minimum_detectable_effect
from eval.problems import held_out, problems_hash
from eval.result import measurement
from eval.score import MATH, Scoring, score, summarize
from eval.stats import ALPHA
from eval.tasks import scoring_of
from eval.vllm_backend import ask_vllm
from kit.core.config.base_rules import CALLED
from kit.core.config.schema import Config
from kit.core.errors import DONE, BadInput
from kit.core.run_directory import RunDir, write_record
from kit.data.problems import Problem, chat_messages
from merge.imported import check_run_alone

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.server_backend import Endpoint
    from reward.pool import WorkerPool

EPILOG = """Keys of the run's configuration can be given as --group.key value. Other commands:
  python -m eval gate --run … (promotes the checkpoint, or prints the rule that it misses)
  python -m eval report --run … (one page on everything in the run)
  python -m eval endpoint --run … --url … (measures one deployed endpoint)
  python -m eval lm_eval --run … (lm-evaluation-harness on the same checkpoint)"""
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "compressed-tensors", "math-verify", "scipy", "numpy")


@dataclass(frozen=True)
class Plan:
    """A checked evaluation: everything that can be refused without weights has been."""

    run: RunDir
    out: Path
    config: Config
    formats: list[str]
    sources: Sources
    problems: list[Problem]
    base: Path | None
    endpoints: dict[tuple[str, str], "Endpoint"] = dataclasses.field(default_factory=dict)
    reuse: bool = False
    scoring: Scoring = MATH
    task: str | None = None
    episodes: Episodes | None = None

    @property
    def asking(self) -> Asking:
        """The request that every cell gets."""
        return ask_settings(self.config, self.problems, self.episodes)

    @property
    def trained(self) -> str:
        """Display name of the trained policy."""
        return trained_name(self.run.config())

    @property
    def reference(self) -> str:
        """The format that the minimum detectable effect is stated for: the gate's if measured, else the first."""
        wanted = self.config.eval.gate.format
        return wanted if wanted in self.formats else self.formats[0]

    def engine(self, policy: str, name: str) -> str:
        """The engine of a cell. nf4 cells are the NF4 base, which transformers computes unless a server does."""
        backend = self.config.eval.backend
        if name == "nf4" and (policy, name) not in self.endpoints:
            return "transformers"
        return backend

    def place(self, policy: str, name: str) -> Path:
        """Directory of a cell's checkpoint; that of the base for nf4."""
        return self.base if name == "nf4" else self.sources.artifacts[policy, name].path


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = command_parser("", __doc__, "where eval.json, eval.md and eval.png go", True, epilog=EPILOG)
    parser.add_argument("--formats", nargs="+", help="columns of the matrix; default eval.formats")
    parser.add_argument("--backend", choices=("transformers", "vllm", "server"), help="default eval.backend")
    parser.add_argument("--url", nargs="+", default=[], metavar="CELL=URL", help="servers, e.g. grpo/fp8=http://…")
    parser.add_argument(
        "--model", nargs="+", default=[], metavar="CELL=NAME", help="model of each cell, if a server has several"
    )
    parser.add_argument(
        "--reuse", action="store_true", help="keep cells that were measured before under identical conditions"
    )
    add_problem_options(parser)
    add_configuration(parser)
    parser.add_argument("--dry_run", action="store_true", help="check everything, load no weights")
    return parser.parse_known_args(argv)


def make_plan(arguments: argparse.Namespace, overrides: list[str]) -> Plan:
    """Return the checked plan; `BadInput` or `CheckFailed` before any weight is loaded."""
    run = RunDir.open(arguments.run, arguments.allow_own_code)
    config, training, place = evaluation_config(run, arguments, overrides)
    check_backend(config.eval.backend, config.eval.temperature, config.eval.samples)
    formats = artifacts.check_formats(arguments.formats or config.eval.formats)
    endpoints = find_endpoints(arguments, config, formats)
    if config.eval.backend == "vllm":
        check_vllm()
    sources = artifacts.find_sources(run, formats)
    problems = held_out(config.data, config.eval.max_problems, training, config.eval.reward)
    base = None  # the original checkpoint is only needed for the nf4 cells
    if "nf4" in formats:
        from merge.verify import base_directory

        base = base_directory(run, arguments.base, weights=not arguments.dry_run)
    out, episodes = Path(arguments.out or place), episodes_of(config, problems, measurement(config)["max_new_tokens"])
    scoring = scoring_of(config, episodes is not None and episodes.environment.owns_reward)
    plan = Plan(
        *(run, out, config, formats, sources, problems, base),
        *(endpoints, arguments.reuse, scoring, arguments.task, episodes),
    )
    check_kernels(plan)
    check_endpoints(plan)
    return plan


def check_kernels(plan: Plan) -> None:
    """Raise `BadInput` naming the cells that vLLM is known not to serve on this processor."""
    if plan.config.eval.backend != "vllm":
        return
    cells = [(policy, name) for name in plan.formats if name != "nf4" for policy in POLICIES]
    missing = {f"{policy}/{name}": missing_kernel(plan.place(policy, name)) for policy, name in cells}
    if lacking := {cell: reason for cell, reason in missing.items() if reason}:
        raise BadInput(
            f"{', '.join(lacking)}: {next(iter(lacking.values()))}. Name other formats with --formats, or measure "
            "with --eval.backend transformers."
        )


def find_endpoints(arguments: argparse.Namespace, config: Config, formats: list[str]) -> dict:
    """Return the server of each cell; `BadInput` if a cell lacks one or a named cell is not measured."""
    from eval.server_backend import Endpoint, parse_cells

    urls, models = parse_cells(arguments.url, "url"), parse_cells(arguments.model, "model")
    if config.eval.backend != "server":
        if urls or models:
            raise BadInput(f"--url and --model need --backend server; eval.backend is {config.eval.backend}.")
        return {}
    cells = [(policy, name) for name in formats for policy in POLICIES]
    if lacking := [cell for cell in cells if cell not in urls and cell[1] != "nf4"]:
        shown = " ".join(f"{policy}/{name}=http://…" for policy, name in lacking)
        raise BadInput(
            f"--backend server needs the URL of every cell; missing: --url {shown}. One deployed endpoint is measured "
            "with python -m eval endpoint."
        )
    if unknown := [f"{policy}/{name}" for policy, name in {**urls, **models} if (policy, name) not in cells]:
        raise BadInput(f"--url or --model names {', '.join(unknown)}, which is not measured: formats are {formats}.")
    if alone := [f"{policy}/{name}" for policy, name in models if (policy, name) not in urls]:
        raise BadInput(f"--model names {', '.join(alone)}, which has no --url.")
    timeout = config.rollout.request_timeout_s
    return {cell: Endpoint(url, models.get(cell), timeout) for cell, url in urls.items()}


def check_endpoints(plan: Plan) -> None:
    """Check that every server lists its model and applies its checkpoint's chat template, before any measuring.

    `BadInput` if one does not.
    """
    from eval.server_backend import PROBES, Client

    for (policy, name), endpoint in plan.endpoints.items():
        few = dataclasses.replace(plan.asking, conversations=plan.asking.conversations[:PROBES])
        with Client(endpoint, plan.place(policy, name), few) as client:
            print(f"server of {policy}/{name}: {client.url} serves {client.model}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Check, measure every cell, compare, write eval.json, eval.md and eval.png; return 0 if all was measured."""
    arguments, overrides = parse_arguments(argv)
    is_imported = arguments.run is None
    if is_imported:
        from eval.adapter import prepare

        if prepare(arguments, overrides) is None:
            return DONE
    else:
        check_run_alone(arguments)
    plan = make_plan(arguments, overrides)
    print(
        f"eval {plan.run.path}: {len(plan.problems)} held-out problems, {{{', '.join(POLICIES)}}} "
        f"x {{{', '.join(plan.formats)}}}, up to {plan.asking.max_new_tokens} new tokens, adapter "
        f"v{plan.sources.adapter_version}"
        + (f", trained for {own}" if (own := plan.sources.trained_for.get("trained_for")) else ""),
        flush=True,
    )
    with contextlib.suppress(BadInput):  # a run without adapters can still compare merged checkpoints
        newest = plan.run.newest_adapter()
        if plan.sources.adapter_version is not None and newest != plan.run.adapter_dir(plan.sources.adapter_version):
            print(f"note: {newest} is newer than the adapter that was merged; merge again to measure it", flush=True)
    if arguments.dry_run:
        for rate in (0.05, 0.2):
            alpha = ALPHA / len(plan.formats)  # adjusted for the number of formats, as in the conclusion
            effect = compare.points(minimum_detectable_effect(len(plan.problems), rate, alpha=alpha))
            print(f"with disagreement on {rate:.0%} of the problems, {effect} points are detectable at 80 % power")
        return DONE
    result = evaluate(plan, sys.argv[1:] if argv is None else argv)
    report.print_summary(result)
    print(f"written: {plan.out / 'eval.json'}, eval.md, eval.png; completions in {plan.out / 'eval'}", flush=True)
    if is_imported and plan.task is None:
        print(f"may it be deployed? python -m eval gate --run {plan.run.as_argument}", flush=True)
    return DONE


def evaluate(plan: Plan, command: list[str]) -> dict:
    """Measure every cell of the plan and write the report; return the content of eval.json."""
    cells: dict[tuple[str, str], Cell] = {}
    matrix: dict[str, dict[str, dict]] = {policy: {} for policy in POLICIES}
    (plan.out / "eval").mkdir(parents=True, exist_ok=True)
    with contextlib.closing(answer_pool(plan.config)) as pool:
        for name, policy in itertools.product(plan.formats, POLICIES):
            cell = cells[policy, name] = measured_cell(plan, policy, name, pool)
            provenance = weights_of(plan, policy, name, cell)
            matrix[policy][name] = {**summarize(cell.records), **cell.facts(), **provenance}
            who = plan.trained.lower() if policy == "grpo" else policy
            print(report.cell_line(who, name, matrix[policy][name]), flush=True)
    records = {place: cell.records for place, cell in cells.items()}
    settings, limits = plan.config.eval, limits_of(plan.config)
    comparison = compare.compare(records, plan.formats, plan.reference, settings.bootstrap_samples, limits=limits)
    result = {
        "n": len(plan.problems),
        "task": plan.task,
        "scoring": plan.scoring.name,
        "problems_hash": problems_hash(plan.problems),
        "matrix": matrix,
        **comparison,
        "conclusion": conclusion(plan, comparison),
        "trained_policy": plan.trained,
        **plan.sources.trained_for,
        **({"base_storage": plan.sources.storage} if plan.sources.storage != "nf4" else {}),
        "base_hash": plan.sources.base_hash,
        "adapter_version": plan.sources.adapter_version,
        "adapter_hash": plan.sources.adapter_hash,
        "data": dataclasses.asdict(plan.config.data),
        "eval": measurement(plan.config) | {"formats": plan.formats},
        "reward_options": plan.config.reward.options,
        **({"environment": environment_identity(plan.config)} if plan.episodes else {}),
        "engine": ", ".join(sorted({cell.engine for cell in cells.values()})),
        "compute_dtype": ", ".join(sorted({cell.dtype for cell in cells.values()})),
        "max_new_tokens": plan.asking.max_new_tokens,
        "temperature": settings.temperature,
        "samples": settings.samples,
        "seed": settings.seed,
        "bootstrap_samples": settings.bootstrap_samples,
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["python", "-m", "eval", *command],
    }
    # The gate reads eval.json, so it is written last: once it exists, everything does.
    report.write_report(result, plan.out)
    write_record(plan.out / "eval.json", result)
    return result


def conclusion(plan: Plan, comparison: dict) -> str:
    """The verdicts in sentences, preceded by one on the format that the run was trained for."""
    own = plan.sources.trained_for.get("trained_for")
    said = compare.conclude(comparison, plan.formats, plan.trained)
    storage = plan.sources.storage
    if storage != "nf4" and "nf4" in plan.formats:
        said = f"nf4 here is the policy as it was trained, and its base is {CALLED[storage]}.\n{said}"
    if own is None:
        return said
    nf4 = f"nf4 is the policy as it was trained, with the numbers of {own}; " if "nf4" in plan.formats else ""
    return f"The training was quantization-aware, for {own}: {nf4}bf16 is the same without quantizers.\n{said}"


def ask_settings(config: Config, problems: list[Problem], episodes: Episodes | None = None) -> Asking:
    """The problems as chat prompts, with a configuration's generation settings."""
    return Asking(
        [chat_messages(config.data, problem) for problem in problems],
        measurement(config)["max_new_tokens"],
        config.eval.temperature,
        config.eval.samples,
        config.eval.seed,
        config.eval.batch_size,
        config.data.chat_template_kwargs,
        episodes,
        config.rollout.stop,
    )


def measured_cell(plan: Plan, policy: str, name: str, pool: "WorkerPool") -> Cell:
    """Measure and write the cell, or with `--reuse` return the one written before."""
    folder, identity = plan.out / "eval", cell_identity(plan, policy, name)
    if plan.reuse:
        found, why = read_cell(folder, policy, name, identity)
        if found is not None:
            return found
        print(f"{policy}/{name}: {why}, measuring it", flush=True)
    cell = measure(plan, policy, name, pool)
    version = plan.sources.adapter_version if policy == "grpo" else None
    write_cell(folder, policy, name, cell, identity, version)
    return cell


def cell_identity(plan: Plan, policy: str, name: str) -> dict:
    """Everything that a cell's records depend on; `--reuse` keeps records if all of it is equal."""
    settings = measurement(plan.config)
    for key in ("backend", "formats", "batch_size", "max_problems", "bootstrap_samples"):
        del settings[key]
    if not settings["stop"]:
        del settings["stop"]  # as in cells of earlier versions
    weights = {"base": plan.sources.base_hash}
    if (artifact := plan.sources.artifacts.get((policy, name))) is not None:
        weights = {"artifact": artifact.hash}
    else:
        weights |= plan.sources.trained_for | ({"adapter": plan.sources.adapter_hash} if policy == "grpo" else {})
    engine = plan.engine(policy, name)
    endpoint = plan.endpoints.get((policy, name))
    reward = dataclasses.asdict(plan.config.reward)
    del reward["workers"]
    return {
        "problems": problems_hash(plan.problems),
        "data": dataclasses.asdict(plan.config.data),
        "eval": settings,
        "reward": reward,
        "scoring": [plan.scoring.name, plan.scoring.version],
        **({"environment": environment_identity(plan.config)} if plan.episodes else {}),
        "weights": weights,
        "engine": engine,
        "endpoint": dataclasses.asdict(endpoint) if endpoint else None,
        "versions": versions() | ({"vllm": vllm_version()} if engine == "vllm" else {}),
    }


def environment_identity(config: Config) -> dict:
    """The settings and sources of a configuration's environment."""
    from kit.environments.load import source_hashes

    return dataclasses.asdict(config.environment) | {"sources": source_hashes(config)}


def weights_of(plan: Plan, policy: str, name: str, cell: Cell) -> dict:
    """Provenance of a cell's weights, for the matrix.

    {"artifact_hash"} for a merged checkpoint whose files were measured; {"quantizers": format} for an nf4 cell that
    computed with the numbers of the format that the run was trained for. A server does not report which weights it
    holds. Only one that names the checkpoint's own directory (vLLM's `root`) is taken to hold it, so that the gate,
    which requires the hash, does not promote what was not measured.
    """
    if (artifact := plan.sources.artifacts.get((policy, name))) is None:
        own = plan.sources.trained_for.get("trained_for")
        return {"quantizers": own} if own and cell.engine == "transformers" else {}
    if cell.engine == "server" and Path(cell.versions.get("root", "/")).resolve() != artifact.path.resolve():
        return {}
    return {"artifact_hash": artifact.hash}


def answer_pool(config: Config) -> "WorkerPool":
    """Worker pool that compares answers, with the limits of the run's rewards."""
    from reward.pool import WorkerPool

    return WorkerPool(workers=config.reward.workers, timeout_s=config.reward.timeout_s)


def measure(plan: Plan, policy: str, name: str, pool: "WorkerPool") -> Cell:
    """Generate and score all completions of one cell, then release its engine."""
    asking, place, engine = plan.asking, plan.place(policy, name), plan.engine(policy, name)

    def ask() -> Answers:
        if engine == "server":
            from eval.server_backend import ask_server

            return ask_server(plan.endpoints[policy, name], place, asking)
        if engine == "vllm":
            return ask_vllm(place, asking, plan.config.server, plan.out / "eval" / f"{policy}-{name}.vllm.log")
        return ask_transformers(lambda: load_cell(plan, policy, name), place, asking)

    return scored_cell(ask, plan.problems, asking, pool, plan.scoring)


def scored_cell(
    ask: Callable[[], Answers], problems: list[Problem], asking: Asking, pool: "WorkerPool", scoring: Scoring
) -> Cell:
    """The cell of the answers that `ask` returns, with the seconds that generation and scoring took."""
    started = time.perf_counter()
    answers = ask()
    records = score(problems, answers.generations, asking.conversations, pool, scoring)
    close_all(answers.generations)
    return Cell(records, answers.engine, answers.dtype, answers.versions, round(time.perf_counter() - started, 2))


def load_cell(plan: Plan, policy: str, name: str) -> "PreTrainedModel":
    """Load the model of one cell: the base with or without the adapter, or the merged checkpoint."""
    from merge.verify import load_for_scoring, load_policy

    if name == "nf4":
        return load_policy(plan.run, plan.sources.adapter if policy == "grpo" else None, base=plan.base)
    return load_for_scoring(plan.sources.artifacts[policy, name].path)


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on, and the machine they were measured on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})"
    return package_versions(PACKAGES) | {"device": device}
