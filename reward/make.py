r"""Generate problems for the rewards "countdown" and "arithmetic".

    python -m reward.make countdown --out data/countdown --train 2000 --test 200

writes `train.jsonl` and `test.jsonl` with columns question and answer, for `data.path`; `data.answer_format` is
`countdown` or (arithmetic) `plain`. Every countdown problem is built from a solution, so it has one. No held-out
problem has the same numbers as a training problem, in any order.
"""

import argparse
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from kit.core.errors import BadInput

QUESTIONS = {
    "countdown": "Using the numbers {numbers}, write an expression that equals {target}. You may use + - * / and "
    "parentheses, and each number exactly once. Put the expression in \\boxed{{}}.",
    "arithmetic": "What is {solution}? Put the value in \\boxed{{}}.",
}
LARGEST_TARGET = 999


def problems(count: int, sizes: list[int], largest: int, seed: int) -> Iterator[tuple[list[int], int, str]]:
    """Yield `count` solvable problems as (numbers, target, solution), no two with the same numbers."""
    source = random.Random(seed)
    seen: set[tuple[int, ...]] = set()
    for _ in range(count * 200):
        if len(seen) == count:
            return
        numbers = [source.randint(1, largest) for _ in range(source.choice(sizes))]
        target, solution = _combined(numbers, source)
        key = tuple(sorted(numbers))
        if key not in seen and target.denominator == 1 and 1 <= target <= LARGEST_TARGET and target not in numbers:
            seen.add(key)
            yield numbers, int(target), solution
    raise BadInput(
        f"only {len(seen):,} of {count:,} problems exist with {sizes} numbers up to {largest}; ask for fewer."
    )


def _combined(numbers: list[int], source: random.Random) -> tuple[Fraction, str]:
    """A random expression of all numbers: its value (0 if a division failed) and its text."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    source.shuffle(parts)
    while len(parts) > 1:
        (a, left), (b, right) = parts.pop(), parts.pop()
        sign = source.choice("+-*/")
        if sign == "/" and (b == 0 or (a / b).denominator != 1):
            sign = "+"
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else Fraction(0)}[sign]
        parts.insert(source.randint(0, len(parts)), (value, f"({left} {sign} {right})"))
    return parts[0]


def write(task: str, folder: Path, train: int, test: int, sizes: list[int], largest: int, seed: int) -> None:
    """Write `train.jsonl` and `test.jsonl` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for numbers, target, solution in problems(train + test, sizes, largest, seed):
        shown = {"numbers": ", ".join(map(str, numbers)), "target": target, "solution": solution[1:-1]}
        answer = json.dumps({"numbers": numbers, "target": target}) if task == "countdown" else str(target)
        rows.append({"question": QUESTIONS[task].format(**shown), "answer": answer})
    for name, part in (("train", rows[:train]), ("test", rows[train:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reward.make", description="Write problems.")
    parser.add_argument("task", choices=sorted(QUESTIONS))
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--numbers", type=int, nargs="+", default=[3, 4], help="how many numbers a problem may have")
    parser.add_argument("--largest", type=int, default=50, help="the largest number")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if min(arguments.numbers) < 2 or max(arguments.numbers) > 8 or arguments.largest < 2:
        parser.error("--numbers takes 2 to 8, --largest at least 2")
    one = arguments
    write(one.task, one.out, one.train, one.test, one.numbers, one.largest, one.seed)
    print(f"{arguments.out}: {arguments.train:,} training and {arguments.test:,} held-out problems")


if __name__ == "__main__":
    main()
