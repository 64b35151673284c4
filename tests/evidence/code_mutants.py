"""MBPP's and HumanEval's reference solutions and mutants of them under the code reward, against plain Python.

    python tests/evidence/code_mutants.py --step 1        # every problem; 12 takes every twelfth

A mutant is the solution with a comparison or an arithmetic operator exchanged, a number one larger, its results None,
or its last line cut. What a mutant deserves is decided by running solution and tests together in a plain interpreter
(no sandbox): some mutants do pass their tests. Prints the disagreements; exit code 1 when there are any.
"""

import argparse
import ast
import gzip
import json
import os
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from reward.code import code as code_reward  # noqa: E402
from reward.code_gold import gold_from_row  # noqa: E402

SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Pow: ast.Mult, ast.BitXor: ast.BitOr,
}  # fmt: skip
PLAIN_TIMEOUT_S = 20.0


def data_folder() -> Path | None:
    """The folder of the problem sets, or None when it is not on this machine."""
    folder = Path(os.environ.get("GRPO_KIT_DATA") or ROOT.parent / "shared" / "data")
    needed = (folder / "mbpp" / "sanitized-mbpp.json", folder / "humaneval" / "HumanEval.jsonl.gz")
    return folder if all(file.is_file() for file in needed) else None


def problems(folder: Path) -> list[dict]:
    """Every problem as {"id", "prompt", "gold", "solution", "given"}; the prompt gave the first `given` lines."""
    mbpp = json.loads((folder / "mbpp" / "sanitized-mbpp.json").read_text())
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "rt") as lines:
        human = [json.loads(line) for line in lines]
    found = []
    for rows, form, column in ((mbpp, "mbpp", "test_list"), (human, "humaneval", "test")):
        for row in rows:
            gold, error = gold_from_row(row, form, column)
            assert gold, (row["task_id"], error)
            solution = row["code"] if form == "mbpp" else row["prompt"] + row["canonical_solution"]
            question = [{"role": "user", "content": row["prompt"]}]
            given = 0 if form == "mbpp" else row["prompt"].count("\n")
            facts = {"id": f"{form} {row['task_id']}", "prompt": question, "gold": gold}
            found.append(facts | {"solution": solution, "given": given})
    return found


def mutants(solution: str, given: int = 0) -> dict[str, str]:
    """Kind of mutation to source; kinds that the solution has no place for are left out.

    What the prompt gave is left alone: HumanEval's tests use helper functions that the kit takes from the prompt and
    plain Python from the solution.
    """
    made = {"results None": _results_none(solution, given), "number larger": _number_larger(solution, given)}
    operators = [node for node in ast.walk(ast.parse(solution)) if _is_operation(node, given)]
    for which in {0, len(operators) - 1} if operators else ():
        tree = ast.parse(solution)
        node = [node for node in ast.walk(tree) if _is_operation(node, given)][which]
        if isinstance(node, ast.Compare):
            node.ops[0] = SWAPS[type(node.ops[0])]()
        else:
            node.op = SWAPS[type(node.op)]()
        made[f"operator {which}"] = ast.unparse(tree)
    made["last line cut"] = solution.rstrip().rpartition("\n")[0]
    return {kind: text for kind, text in made.items() if text and text != ast.unparse(ast.parse(solution))}


def _mutants_of(problem: dict) -> list[tuple[str, str]]:
    return list(mutants(problem["solution"], problem["given"]).items())


def _is_operation(node: ast.AST, given: int) -> bool:
    first = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
    kinds = ast.Compare | ast.BinOp | ast.BoolOp | ast.AugAssign
    return type(first) in SWAPS and isinstance(node, kinds) and node.lineno > given


def _results_none(solution: str, given: int) -> str:
    tree = ast.parse(solution)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.lineno > given:
            node.value = ast.Constant(None)
    return ast.unparse(tree)


def _number_larger(solution: str, given: int) -> str:
    tree = ast.parse(solution)
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.lineno > given]
    numbers = [node for node in constants if type(node.value) is int]
    if not numbers:
        return ""
    numbers[-1].value += 1
    return ast.unparse(tree)


def plain(solution: str, gold: str) -> bool:
    """Whether the tests pass when solution and tests run together in an interpreter of their own.

    The exit code alone would call a solution right that calls exit(): the program must reach its last line.
    """
    tests = json.loads(gold)
    program = "\n".join([tests["prompt"], solution, "__name__ = 'tests'", tests["setup"], *tests["tests"]])
    if tests["tests"][0].startswith("check("):
        # The prompt's function is the solution's here; the prompt has run before it.
        program = "\n".join([solution, tests["setup"], *tests["tests"]])
    reached = secrets.token_hex(16)
    program += f"\nprint({reached!r})"
    try:
        command = [sys.executable, "-I", "-c", program]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=PLAIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.decode(errors="replace").rstrip().endswith(reached)


def compare(chosen: list[dict], timeout_s: float = 20.0) -> dict:
    """Counts, times and disagreements of the reward with plain Python."""

    def rewards(samples: list[tuple[dict, str]]) -> list[float | None]:
        fenced = [[{"role": "assistant", "content": f"Here:\n```python\n{text}\n```\n"}] for _, text in samples]
        golds = [problem["gold"] for problem, _ in samples]
        return code_reward([problem["prompt"] for problem, _ in samples], fenced, golds, timeout_s=timeout_s)

    started = time.perf_counter()
    paid = rewards([(problem, problem["solution"]) for problem in chosen])
    seconds = time.perf_counter() - started
    unpaid = [problem["id"] for problem, reward in zip(chosen, paid, strict=True) if reward != 1.0]
    table = [(problem, kind, text) for problem in chosen for kind, text in _mutants_of(problem)]
    started = time.perf_counter()
    paid = rewards([(problem, text) for problem, _, text in table])
    mutant_seconds = time.perf_counter() - started
    with ThreadPoolExecutor(2) as pool:
        deserved = list(pool.map(lambda row: plain(row[2], row[0]["gold"]), table))
    disagreements = [
        f"{problem['id']}, {kind}: paid {reward}, plain Python says {'passed' if truth else 'failed'}"
        for (problem, kind, _), reward, truth in zip(table, paid, deserved, strict=True)
        if reward != float(truth)
    ]
    facts = {"references": len(chosen), "unpaid": unpaid, "seconds": seconds, "mutants": len(table)}
    facts |= {"mutants_that_pass": sum(deserved), "mutant_seconds": mutant_seconds, "disagreements": disagreements}
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=1)
    step = parser.parse_args().step
    folder = data_folder()
    if folder is None:
        sys.exit("needs mbpp/sanitized-mbpp.json and humaneval/HumanEval.jsonl.gz in the folder $GRPO_KIT_DATA")
    facts = compare(problems(folder)[::step])
    print(
        f"references: {facts['references']}, not paid: {facts['unpaid']}, {facts['seconds']:.1f} s\n"
        f"mutants: {facts['mutants']} in {facts['mutant_seconds']:.1f} s, of which {facts['mutants_that_pass']} pass "
        f"their tests; disagreements with plain Python: {len(facts['disagreements'])}"
    )
    print(*facts["disagreements"], sep="\n")
    sys.exit(bool(facts["unpaid"] or facts["disagreements"]))


if __name__ == "__main__":
    main()
