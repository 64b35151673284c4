"""Split problems by content into train.jsonl and heldout.jsonl: near-copies never fall on both sides.

For sets without a split whose problems are variants of each other, such as SVAMP: one story with other numbers, or
with another question. A random split would train on the held-out problems' twins. Problems are grouped by their words
without numbers and names (kit/data/near_copies.py), and whole groups are drawn.

    python -m recipes.split_problems svamp/test.jsonl --out data/svamp --heldout 300 --seed 0
    python -m recipes.split_problems --id ChilleD/SVAMP --splits train+test --out data/svamp   # from the hub
    python -m recipes.split_problems gsm8k/test.jsonl --against gsm8k/train.jsonl --answer_format gsm8k

With `--against` nothing is written: it prints how similar the nearest problem of a given training file is, for a set
that has its own split. Reads what `data.path` of a recipe reads, with columns `question` and `answer`, `Body+Question`
and `Answer`, TRL's or verl's, or those named. Writes `question` (text, or the messages of a conversation) and `answer`
(the final one), for `data.answer_format: plain`.
"""

import argparse
import json
import random
from pathlib import Path

from kit.core.errors import BadInput, run_command
from kit.core.run_directory import publish, write_manifest

COLUMNS = (("question", "answer"), ("Body+Question", "Answer"), ("problem", "answer"))
NEAR = (0.4, 0.6, 0.8, 1.0)  # similarities that `--against` counts


def read(options: argparse.Namespace, path: str | None) -> list:
    """The usable problems of a file or of the hub; raises `BadInput` for the same faults as a recipe."""
    from kit.core.config.schema import DataConfig
    from kit.data.problems import first_row, load_problems

    data = DataConfig(id=options.id, path=path, train_split=options.splits, answer_format=options.answer_format)
    data.max_bad_fraction = options.max_bad_fraction
    row = first_row(data, "train")
    pairs = [(options.question_column or question, options.answer_column or answer) for question, answer in COLUMNS]
    found = (pair for pair in pairs if {*pair[0].split("+"), pair[1]} <= set(row))
    data.question_column, data.answer_column = next(found, pairs[0])
    return load_problems(data, "train")


def draw(grouped: list[list[int]], heldout: int, rng: random.Random) -> set[int]:
    """Indices of whole groups, drawn in random order, that add up to `heldout` problems or as many as fit."""
    order = [*grouped]
    drawn: set[int] = set()
    rng.shuffle(order)
    for group in order:
        if len(drawn) + len(group) <= heldout:
            drawn.update(group)
    return drawn


def quantiles(values: list[float]) -> str:
    """Median, 95th percentile and largest, in words."""
    ordered = sorted(values)
    middle, high = ordered[len(ordered) // 2], ordered[int(0.95 * (len(ordered) - 1))]
    return f"median {middle:.2f}, 95 % {high:.2f}, largest {ordered[-1]:.2f}"


def against(problems: list, others: list) -> None:
    """Print how similar the problems are to those of another file."""
    from kit.data.near_copies import nearest

    found = nearest([one.question for one in problems], [one.question for one in others])
    values = quantiles([value for value, _ in found])
    print(f"similarity of {len(problems):,} problems to the nearest of {len(others):,}: {values}")
    for least in NEAR:
        count = sum(value >= least for value, _ in found)
        print(f"{least:.1f} or more: {count:,} ({count / len(found):.1%})")
    pairs = zip(found, problems, strict=True)
    for (value, index), problem in sorted(pairs, key=lambda pair: -pair[0][0])[:3]:
        if index is not None:
            print(f"{value:.2f}  {problem.source}  {others[index].source}")


def split(problems: list, options: argparse.Namespace, out: Path) -> None:
    """Write both sides of a split and print its figures."""
    from kit.data.near_copies import groups, nearest

    questions = [problem.question for problem in problems]
    grouped = groups(questions, options.similarity)
    largest = max(map(len, grouped))
    print(f"{len(problems):,} problems in {len(grouped):,} groups, the largest of {largest:,}", flush=True)
    drawn = draw(grouped, options.heldout, random.Random(options.seed))
    if not drawn or len(drawn) == len(problems):
        raise BadInput(
            f"no split: {len(drawn):,} of {len(problems):,} problems would be held out (groups: {len(grouped):,}, the "
            f"largest of {largest:,}). Change --heldout ({options.heldout:,}), or raise --similarity "
            f"({options.similarity:g})."
        )
    sides = {"train": [p for i, p in enumerate(problems) if i not in drawn]}
    sides["heldout"] = [problems[index] for index in sorted(drawn)]
    for name, rows in sides.items():
        pairs = [{"question": row.messages or row.question, "answer": row.gold} for row in rows]
        lines = [json.dumps(pair, ensure_ascii=False) for pair in pairs]
        (out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        count = sum((group[0] in drawn) == (name == "heldout") for group in grouped)
        print(f"{name:<8} {len(rows):,} problems in {count:,} groups", flush=True)
    left = [value for value, _ in nearest(*([row.question for row in sides[name]] for name in ("heldout", "train")))]
    print(f"similarity of a held-out problem to the nearest training problem: {quantiles(left)}", flush=True)
    facts = {"seed": options.seed, "similarity": options.similarity, "groups": len(grouped), "largest_left": max(left)}
    write_manifest(out, "split-problems", created=None, **facts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", nargs="?", help="jsonl, json or parquet file with all problems")
    parser.add_argument("--id", help="instead of a file: a data set on the hub, e.g. ChilleD/SVAMP")
    parser.add_argument("--splits", default="train", help="its splits, joined by +")
    parser.add_argument("--against", metavar="FILE", help="compare with this training file and write nothing")
    parser.add_argument("--out", help="directory to write")
    parser.add_argument("--heldout", type=int, default=300, help="problems to hold out")
    parser.add_argument("--similarity", type=float, default=0.4, help="near-copies are at least this similar")
    parser.add_argument("--seed", type=int, default=0, help="seed that decides which groups are held out")
    parser.add_argument("--question_column", help="A+B joins two")
    parser.add_argument("--answer_column")
    parser.add_argument("--answer_format", default="plain", choices=("plain", "gsm8k", "boxed"))
    parser.add_argument("--max_bad_fraction", type=float, default=0.0, help="share of rows that may be unusable")
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if (options.file is None) == (options.id is None):
        raise BadInput("name either a file with problems, or a data set of the hub with --id.")
    if (options.out is None) == (options.against is None):
        raise BadInput("name either --out, the directory to write, or --against, a file to compare with.")
    if not 0 < options.similarity <= 1 or options.heldout < 1:
        raise BadInput(
            f"--similarity ({options.similarity:g}) must be above 0 and at most 1, --heldout ({options.heldout}) at "
            "least 1."
        )
    problems = read(options, options.file)
    if options.against:
        return against(problems, read(options, options.against))
    with publish(Path(options.out), options.overwrite) as out:
        split(problems, options, out)
    print(f"wrote {options.out}", flush=True)


if __name__ == "__main__":
    run_command(main)
