"""Write the data set of a verifiers environment as train.jsonl and test.jsonl, for `data.path` of a run with it.

    .venv-verifiers/bin/python -m recipes.verifiers_rows my-env --args '{difficulty: hard}' --out data/my-env

Rows keep all columns: `prompt` as messages, with the environment's system prompt and examples, `answer`, `info` and
what its rubric asks for. Prints the group `data` of the configuration. A run reads these files, and so does a resumed
one, whatever the environment generates by then.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kit.core.errors import BadInput, run_command
from kit.core.run_directory import publish, write_manifest
from kit.core.yaml_files import parse_yaml

SPLITS = {"train": "train", "eval": "test"}  # of verifiers, and names of the files


def lines(rows: Iterator[dict[str, Any]]) -> list[str]:
    """One line per row, without the columns that are null in it: those of other rows."""
    kept = ({key: value for key, value in row.items() if value is not None} for row in rows)
    return [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in kept]


def data_group(out: Path, files: dict[str, list[str]]) -> dict[str, Any]:
    """The group `data` of a configuration that trains on these files."""
    splits = {"train_split": "train"} | ({"eval_split": "test"} if "test" in files else {})
    return {"path": str(out), **splits, "question_column": "prompt", "answer_column": "answer", "answer_format": "any"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("id", help="of the environment, as in environment.options.id")
    parser.add_argument("--args", default="{}", help="as in environment.options.args, e.g. '{difficulty: hard}'")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--overwrite", action="store_true")
    options = parser.parse_args()
    from kit.environments.verifiers import load, rows

    try:
        arguments = parse_yaml(options.args)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise BadInput(f"--args must be a group of arguments, such as '{{difficulty: hard}}', it is {options.args!r}.")
    environment, out = load(options.id, arguments), Path(options.out)
    files = {name: found for split, name in SPLITS.items() if (found := lines(rows(environment, split)))}
    if "train" not in files:
        raise BadInput(f"{options.id} has no training data. Name problems of your own with data.path.")
    with publish(out, options.overwrite) as folder:
        for name, found in files.items():
            (folder / f"{name}.jsonl").write_text("".join(found))
            print(f"{name:<6} {len(found):,} problems", flush=True)
        write_manifest(folder, "verifiers-rows", environment=options.id, arguments=arguments)
    print(f"wrote {out}\n\n{yaml.safe_dump({'data': data_group(out, files)}, sort_keys=False)}", end="", flush=True)


if __name__ == "__main__":
    run_command(main)
