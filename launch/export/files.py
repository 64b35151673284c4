"""The files of an export: run.sh, overrides.yaml, the data as verl reads it, the rewards as verl calls them."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from kit.core.config.schema import Config
from kit.core.one_line import in_comment
from kit.core.run_directory import publish
from kit.data.problems import Problem, chat_messages, read_problems
from launch.export.translate import Translation, epochs
from launch.vllm_command import ROOT
from reward import gold_checks, heldout_gold_checks, reward_functions

PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]*[A-Za-z_./@%][A-Za-z0-9_./:@%+-]*")
WORDS_OF_YAML = {"null", "true", "false", "none", "yes", "no", "on", "off", "inf", "nan"}


def write(config: Config, translation: Translation, out: Path, command: str) -> str:
    """Write the export and return a report. `BadInput` (rewards, data, `out`) comes before anything is written."""
    reward_functions(config.reward)
    train, report = read_problems(config.data, "train", gold_checks(config.reward.functions))
    heldout, _ = read_problems(config.data, "eval", heldout_gold_checks(config))
    heldout = heldout[: config.eval.max_problems]
    values = translation.values
    values["trainer.total_epochs"] = epochs(len(train), values)
    notes = "".join(f"- {note}\n" for note in translation.notes)
    with publish(out) as folder:
        write_parquet(folder / "train.parquet", train, config, "train")
        write_parquet(folder / "test.parquet", heldout, config, "test")
        (folder / "reward_function.py").write_text(reward_file(config))
        (folder / "overrides.yaml").write_text(yaml_file(translation, command))
        (folder / "notes.md").write_text(f"# What is another thing in verl\n\n{notes}")
        run = folder / "run.sh"
        run.write_text(run_file(translation, command))
        run.chmod(0o755)
    return (
        f"{out}: {len(train):,} problems ({report.summary()}), {len(heldout):,} held out, {len(values)} overrides\n"
        f"What is another thing in verl ({out / 'notes.md'}):\n{notes}"
        f"Hold it against verl's own code: make verl, then python -m launch.export check {out}"
    )


def write_parquet(path: Path, problems: list[Problem], config: Config, split: str) -> None:
    """Write one row per problem, in the format of verl's examples/data_preprocess."""
    import pyarrow
    import pyarrow.parquet

    source = config.data.id or Path(config.data.path).name
    rows = []
    for index, problem in enumerate(problems):
        prompt = chat_messages(config.data, problem)
        rows.append(
            {
                "data_source": source,
                "prompt": prompt,
                "ability": "problem",
                "reward_model": {"style": "rule", "ground_truth": problem.gold},
                # verl passes the reward no prompt; the kit's rewards ignore text that only repeats it.
                "extra_info": {"split": split, "index": index, "problem_id": problem.id, "prompt": prompt},
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def override(key: str, value: Any, is_added: bool) -> str:
    """One override in hydra's grammar."""
    return f"{'+' if is_added else ''}{key}={_spell(value)}"


def _spell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_spell, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_spell(entry)}' for key, entry in value.items())}}}"
    text = str(value)
    if PLAIN.fullmatch(text) and text.lower() not in WORDS_OF_YAML and not _is_number(text):
        return text
    # Inside hydra's quotes, escape a quotation mark and the backslashes in front of it.
    quoted = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    end = len(text) - len(text.rstrip("\\"))
    return f"'{quoted}{chr(92) * end}'"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def words(translation: Translation) -> list[str]:
    return [override(key, value, key in translation.added) for key, value in translation.values.items()]


def run_file(translation: Translation, command: str) -> str:
    lines = " \\\n".join(f"  {shlex.quote(word)}" for word in words(translation))
    return f"""#!/usr/bin/env bash
# Written by: {in_comment(command)}
# For verl's environment, on the head node of a running Ray cluster (one machine needs none). The files beside this one
# and the kit's checkout must be where they are on every node. Further overrides can follow: ./run.sh key=value
set -euo pipefail
exec python3 -m verl.trainer.main_ppo \\
{lines} \\
  "$@"
"""


def yaml_file(translation: Translation, command: str) -> str:
    """The same overrides as a verl configuration file."""
    nested: dict[str, Any] = {}
    for key, value in translation.values.items():
        *groups, leaf = key.split(".")
        target = nested
        for group in groups:
            target = target.setdefault(group, {})
        target[leaf] = value
    head = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_trainer", "_self_"],
    }
    return (
        f"# Written by: {in_comment(command)}\n"
        "# The overrides of run.sh as one configuration; --config-path takes this file's folder as an absolute path:\n"
        "#   python3 -m verl.trainer.main_ppo --config-path DIRECTORY --config-name overrides\n"
        f"{yaml.safe_dump(head, sort_keys=False)}{yaml.safe_dump(nested, sort_keys=False)}"
    )


def reward_file(config: Config) -> str:
    """Source of a module with verl's compute_score, which calls the kit's rewards with this run's options."""
    settings = json.dumps(dataclasses.asdict(config.reward), indent=4, ensure_ascii=False)
    return REWARD_FILE.format(kit=str(ROOT), settings=repr(settings) if "'''" in settings else f"r'''{settings}'''")


REWARD_FILE = '''"""The kit's rewards behind verl's compute_score; the kit's checkout must be on every node."""

import json
import sys

KIT = {kit!r}
if KIT not in sys.path:
    sys.path.insert(0, KIT)

from kit.core.config.schema import RewardConfig  # noqa: E402
from reward import reward_functions  # noqa: E402

SETTINGS = json.loads({settings})
FUNCTIONS, WEIGHTS = reward_functions(RewardConfig(**SETTINGS))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """The weighted sum as "score", each reward by name, and "unknown": 1.0 when one could not be computed.

    Such a sample scores 0.0, because verl has no place for a masked one; too many of them raise, which ends the run.
    """
    prompt = (extra_info or {{}}).get("prompt")
    # From parquet it comes as an array.
    prompts = None if prompt is None else [[dict(message) for message in prompt]]
    values = {{
        function.__name__: function(prompts=prompts, completions=[solution_str], gold=[ground_truth])[0]
        for function in FUNCTIONS
    }}
    is_unknown = any(value is None for value in values.values())
    known = {{name: 0.0 if value is None else float(value) for name, value in values.items()}}
    score = sum(weight * value for weight, value in zip(WEIGHTS, known.values(), strict=True))
    return {{"score": 0.0 if is_unknown else score, "unknown": float(is_unknown), **known}}
'''
