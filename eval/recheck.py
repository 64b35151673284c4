"""What an eval.json says, derived again from the completions that it was made of.

The gate judges these figures and not those of the file: completions are compared with the hash in their header, their
header with the checkpoints, problems and settings that the gate is about, and every verdict is made again from the
completion's text. An eval.json that says something else was edited or damaged.
Not covered: whether the checkpoints generate these completions (`python -m eval` again does), verdicts that a model, a
user's own function or an environment gave, and code where `reward.allow_code_execution` is not set.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.artifacts import POLICIES
from eval.cells import differing, meta_file, read_records, records_file
from eval.compare import compare
from eval.generate import Generation
from eval.hygiene import limits_of
from eval.problems import problems_hash
from eval.record import Record
from eval.result import measurement
from eval.score import score, summarize
from eval.tasks import MATH_FORMATS, scoring_of
from kit.core.config.schema import Config, DataConfig
from kit.core.errors import BadInput
from kit.core.file_kinds import CELL
from kit.core.run_files import read_object
from kit.data.problems import Problem, chat_messages

VERDICT = ("parsed", "answer", "correct", "correct_strict", "prompt_leak")
COUNTED = ("n", "samples", "undecided", "correct", "accuracy", "max_token_hits", "mean_tokens")


def rechecked(
    folder: Path, config: Config, result: dict, problems: Sequence[Problem], hashes: Mapping[tuple[str, str], str]
) -> dict:
    """`result`, an eval.json, with everything that the gate reads from it derived from the completions in `folder`.

    `hashes` are the artifact hashes of the cells that the gate reads. `BadInput` if completions are missing, damaged,
    of other problems, checkpoints or settings, if a verdict is not that of its completion, or if eval.json says
    something that does not follow from them.
    """
    formats = list(dict.fromkeys(name for _, name in hashes))
    records = {cell: cell_records(folder, cell, config, problems, digest) for cell, digest in hashes.items()}
    check_verdicts(config, problems, records)
    reference, samples = config.eval.gate.format, config.eval.bootstrap_samples
    found = compare(records, formats, reference, samples, limits=limits_of(config))
    matrix: dict[str, dict] = {policy: {} for policy in POLICIES}
    for (policy, name), rows in records.items():
        said, cell = result["matrix"][policy][name], summarize(rows)
        follows(said, cell, [*COUNTED, *(key for key in cell if key.endswith("_rate"))], f"matrix.{policy}.{name}")
        matrix[policy][name] = {**said, **cell}
    for name in formats:
        for part in ("gain", "gain_survival", "quantization_loss"):
            if name in found[part]:
                said = (result.get(part) or {}).get(name)
                follows(said, found[part][name], ["difference", "interval", "n"], f"{part}.{name}")
    return {**result, **found, "n": len(problems), "matrix": matrix, "conclusion": result["conclusion"]}


def cell_records(
    folder: Path, cell: tuple[str, str], config: Config, problems: Sequence[Problem], artifact: str
) -> list[Record]:
    """The completions of a cell, after checking whose they are."""
    file = records_file(folder / "eval", *cell)
    header = meta_file(folder / "eval", *cell)
    if not header.is_file() or not file.is_file():
        missing = file if header.is_file() else header
        raise BadInput(f"{missing} does not exist: the gate reads the completions behind eval.json. Evaluate again.")
    identity = read_object(header, CELL)["identity"]
    wanted = {
        "problems": problems_hash(problems),
        "data": dataclasses.asdict(config.data),
        "eval": identity_settings(config),
        "weights": {"artifact": artifact},
        "reward": {"options": config.reward.options},
    }
    known = {key: identity.get(key) or {} for key in wanted}
    known["eval"] = {key: value for key, value in {"stop": [], **known["eval"]}.items() if key in wanted["eval"]}
    known["data"] = dataclasses.asdict(DataConfig()) | known["data"]
    known["reward"] = {"options": known["reward"].get("options", {})}
    if other := differing(known, json.loads(json.dumps(wanted))):
        raise BadInput(
            f"{header} is of another measurement than the gate is about: {', '.join(other)} differ. Evaluate again."
        )
    records = read_records(file)
    samples = config.eval.samples
    asked = [(problem.id, problem.gold, sample) for problem in problems for sample in range(samples)]
    there = [(record.problem_id, record.gold, record.sample) for record in records]
    if there != asked:
        place = next((at for at, (one, two) in enumerate(zip(there, asked, strict=False)) if one != two), len(asked))
        raise BadInput(
            f"{file} does not hold {samples} completion{'s' * (samples > 1)} of each of the {len(problems)} held-out "
            f"problems, in order: it has {len(there)} lines, and line {place + 1} differs. Evaluate again."
        )
    longest = measurement(config)["max_new_tokens"]
    for number, record in enumerate(records, 1):
        if record.tokens > longest or (record.ended and record.hit_max_tokens):
            raise BadInput(
                f"{file}:{number} cannot be a completion of at most {longest} tokens: it has {record.tokens}, ended "
                f"{record.ended}, hit_max_tokens {record.hit_max_tokens}. Evaluate again."
            )
    return records


def identity_settings(config: Config) -> dict[str, Any]:
    """The settings that decide what is generated and how it is judged, as a cell's header has them."""
    settings = measurement(config)
    for key in ("backend", "formats", "batch_size", "max_problems", "bootstrap_samples"):
        del settings[key]
    return settings


def is_judged_again(config: Config) -> bool:
    """Whether the verdicts of a configuration's evaluation follow from the completions alone, without a model, a
    function from outside the kit or code that may not run."""
    from reward import MODELS, REWARDS

    name = config.eval.reward
    if config.environment.is_given:
        return False
    if name is None:
        return config.data.answer_format in MATH_FORMATS or config.reward.allow_code_execution
    if name not in REWARDS or name in MODELS:
        return False
    return config.reward.allow_code_execution or not getattr(REWARDS[name], "executes_code", False)


def check_verdicts(
    config: Config, problems: Sequence[Problem], records: Mapping[tuple[str, str], list[Record]]
) -> None:
    """Judge every completion again; `BadInput` names the first whose stored verdict is another. A comparison that is
    beyond its limits now keeps the stored verdict."""
    if not is_judged_again(config):
        print("note: verdicts were given by a model, an environment or code, so the gate takes them as stored")
        return
    from eval.run import answer_pool

    scoring, asked = scoring_of(config), [chat_messages(config.data, problem) for problem in problems]
    with contextlib.closing(answer_pool(config)) as pool:
        for (policy, name), stored in records.items():
            now = score(problems, [as_generated(record) for record in stored], asked, pool, scoring)
            for number, (before, after) in enumerate(zip(stored, now, strict=True), 1):
                keys = VERDICT if after.correct is not None and after.correct_strict is not None else ("prompt_leak",)
                if other := [key for key in keys if getattr(before, key) != getattr(after, key)]:
                    key = other[0]
                    raise BadInput(
                        f"completion {number} of {policy} in {name} ({before.problem_id}) is stored with {key} "
                        f"{getattr(before, key)!r:.60}; judged again it is {getattr(after, key)!r:.60}. The "
                        "completions were edited, or judged by another version. Evaluate again."
                    )


def as_generated(record: Record) -> Generation:
    """The completion of a record as it was judged."""
    text = record.completion if record.text is None else record.text
    return Generation(text, record.completion, record.tokens, record.ended, record.hit_max_tokens)


def follows(said: Any, found: dict, keys: Sequence[str], where: str) -> None:
    """Raise `BadInput` unless the entries `keys` that eval.json has at `where` are those of `found`."""
    for key in keys:
        before = said.get(key) if isinstance(said, dict) else None
        if not is_close(before, found[key]):
            raise BadInput(
                f"eval.json says {where}.{key} {before!r:.80}, and its completions give {found[key]!r:.80}: the file "
                "was edited, or written by another version. Evaluate again."
            )


def is_close(one: Any, other: Any) -> bool:
    """Whether two figures, or two lists of them, are equal up to rounding."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-9
    return one is None and other is None
