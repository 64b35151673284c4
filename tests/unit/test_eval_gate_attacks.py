"""Attempts to have the gate promote what should not be: none does.

Two runs whose evaluations are real but for the generation: in `strong` GRPO solves most problems and the gate promotes
it, in `weak` it gained nothing and the gate does not. An attack edits a copy, as carefully as it says.
"""

import dataclasses
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval import gate, recheck
from eval import run as eval_run
from eval.backends import Answers
from eval.cells import meta_file, records_file
from eval.compare import compare
from eval.generate import Generation
from eval.score import summarize
from kit.core.checksum import line_of
from kit.core.config.load import config_from_dict
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import BASE as BASE_FACTS
from kit.core.ledger import ledger_facts
from kit.core.run_directory import (
    MANIFEST,
    RunDir,
    file_hash,
    publish,
    read_manifest,
    write_json,
    write_manifest,
    write_record,
)
from kit.core.run_files import read_json
from kit.data.leaks import find_leaks
from kit.data.problems import Problem, load_problems
from kit.train.record import Recorder
from tests.unit.filled import filled

PROBLEMS = 60
SOLVED = {"strong": 50, "weak": 22}  # by GRPO; the base solves 20
BASE = 20
CELLS = [*itertools.product(("base", "grpo"), ("bf16", "fp8"))]
STORIES = [
    "A baker in {town} sells {a} rolls in the morning, and then he sells {b} rolls in the afternoon. How many rolls "
    "does he sell altogether?",
    "Compute $\\dfrac{{{a}}}{{4}} \\times \\left({b} + 8\\right)$. Give the result as a decimal number, please.",
]


def questions(count: int, first: int) -> list[dict]:
    draw = random.Random(first)
    rows = []
    for index in range(count):
        a, b = first + index, draw.randrange(10, 99)
        text = STORIES[index % 2].format(a=a, b=b, town=("Riga", "Oslo", "Bern")[index % 3])
        rows.append({"question": text, "answer": str(a + b)})
    return rows


def write_rows(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, name: str) -> RunDir:
    """A run with a ledger, an adapter, merged checkpoints of a few bytes, and its evaluation."""
    run = RunDir(folder / "run")
    run.path.mkdir(parents=True)
    write_rows(folder / "train.jsonl", questions(8, 500))
    write_rows(folder / "test.jsonl", questions(PROBLEMS, 100))
    values = {
        "run": {"name": name},
        "model": {"id": "tiny"},
        "train": {"max_steps": 4},
        "data": {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "test.jsonl")},
        "eval": {"formats": ["bf16", "fp8"], "gate": {"format": "fp8", "max_quantization_loss": 0.2}},
    }
    write_record(run.config_file, {"config": values})
    write_record(run.base_file, filled(BASE_FACTS, {"hash": "b" * 64}))
    config = config_from_dict(values)
    recorder, trained = Recorder(run, config), load_problems(config.data, "train")
    for step in range(1, 5):
        recorder.ledger(step, [one.id for one in trained[2 * step - 2 : 2 * step]])
    with publish(run.adapter_dir(4)) as partial:
        (partial / "adapter_model.safetensors").write_bytes(f"adapter of {name}".encode())
        ledger = ledger_facts(run.ledger_file, 4)
        adapter = write_manifest(partial, "adapter", version=4, step=4, base_hash="b" * 64, ledger=ledger)
    digest = adapter["files"]["adapter_model.safetensors"]["blake2b"]
    for policy, used in CELLS:
        with publish(run.merged / policy / used) as partial:
            (partial / "model.safetensors").write_bytes(f"weights of {policy} {used} in {name}".encode())
            (partial / "config.json").write_text("{}")
            own = {"adapter_version": 4, "adapter_hash": digest} if policy == "grpo" else {}
            verified = {"mean_kl": 0.001, "max_abs_dlogp": 0.01, "top1_agreement": 0.99, "tokens": 512}
            facts = {"policy": policy, "format": used, "base_hash": "b" * 64, "verify": verified}
            write_manifest(partial, "checkpoint", **facts, **own)
    return run


def answered(problems: list[Problem], solved: int) -> list[Generation]:
    texts = [f"\\boxed{{{int(one.gold) + (at >= solved)}}}" for at, one in enumerate(problems)]
    return [Generation(text, text, tokens=9, ended=True, hit_max_tokens=False) for text in texts]


def evaluate(run: RunDir, solved: int) -> None:
    """`python -m eval` with these many problems solved by GRPO."""

    def measure(plan: Any, policy: str, name: str, pool: Any) -> Any:
        made = answered(plan.problems, solved if policy == "grpo" else BASE)
        return eval_run.scored_cell(
            lambda: Answers(made, "transformers", "float32"), plan.problems, plan.asking, pool, plan.scoring
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval_run, "measure", measure)
        patch.setattr(eval_run.report, "write_report", lambda *_: None)
        assert eval_run.main(["--run", str(run.path)]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for name, solved in SOLVED.items():
        folder = found[name] = tmp_path_factory.mktemp(name) / "made"
        evaluate(make_run(folder, name), solved)
    return found


@pytest.fixture
def copied(made, tmp_path) -> Callable[[str], RunDir]:
    """`copied(name)`: the run, at the paths that its configuration names; put back afterwards."""

    def copy(name: str) -> RunDir:
        folder = made[name]
        aside = tmp_path / name
        shutil.copytree(folder, aside)
        undo.append((folder, aside))
        return RunDir(folder / "run")

    undo: list[tuple[Path, Path]] = []
    yield copy
    for folder, aside in undo:
        shutil.rmtree(folder)
        shutil.copytree(aside, folder)


def decide(run: RunDir, *overrides: str) -> int:
    return gate.main(["--run", str(run.path), *overrides])


def promoted(run: RunDir) -> bool:
    return read_json(run.merged / "grpo" / "fp8" / MANIFEST).get("promoted", False)


def test_without_an_attack_the_strong_run_is_promoted_and_the_weak_one_is_not(copied):
    strong, weak = copied("strong"), copied("weak")
    assert decide(strong) == 0 and promoted(strong)
    assert decide(weak) == 1 and not promoted(weak)


# What an attack edits. A careful one writes new checksums and new hashes wherever there are some.


def edit_result(run: RunDir, change: Callable[[dict], None], careful: bool = True) -> None:
    result = read_json(run.eval_file)
    change(result)
    (write_record if careful else write_json)(run.eval_file, result)


def rows_of(run: RunDir, cell: tuple[str, str]) -> list[dict]:
    return [json.loads(line) for line in records_file(run.path / "eval", *cell).read_text().splitlines()]


def edit_records(
    run: RunDir,
    change: Callable[[list[dict]], list[dict]],
    cells: tuple = (("grpo", "bf16"), ("grpo", "fp8")),
    careful: bool = True,
) -> None:
    """Change the lines of cells; if `careful`, their headers and the whole eval.json follow from the new lines."""
    for cell in cells:
        file = records_file(run.path / "eval", *cell)
        write_rows(file, change(rows_of(run, cell)))
        if careful:
            header = meta_file(run.path / "eval", *cell)
            write_record(header, read_json(header) | {"records": file_hash(file)})
    if careful:
        follow(run)


def follow(run: RunDir) -> None:
    """Make eval.json say what the cells' files say."""
    from eval.cells import read_records

    records = {cell: read_records(records_file(run.path / "eval", *cell)) for cell in CELLS}
    result = read_json(run.eval_file)
    try:
        result |= compare(records, ["bf16", "fp8"], "fp8", 10_000)
    except (BadInput, CheckFailed):  # cells of different problems, which only a whole forgery would hide
        pass
    for (policy, name), rows in records.items():
        try:
            result["matrix"][policy][name] |= summarize(rows)
        except BadInput:
            pass
    write_record(run.eval_file, result)


def each(change: Callable[[dict], dict]) -> Callable[[list[dict]], list[dict]]:
    return lambda rows: [row | change(row) for row in rows]


def edit_header(run: RunDir, path: str, value: object) -> None:
    """Of all four cells: as if the completions had been made so, and eval.json said otherwise."""
    for cell in CELLS:
        header = meta_file(run.path / "eval", *cell)
        facts = read_json(header)
        *parents, leaf = path.split(".")
        target = facts["identity"]
        for parent in parents:
            target = target[parent]
        target[leaf] = value
        write_record(header, facts)


def passing(result: dict) -> None:
    good = {"difference": 0.5, "interval": [0.35, 0.65]}
    for name in ("bf16", "fp8"):
        result["gain"][name] |= good


def accuracies(result: dict) -> None:
    for cell in result["matrix"]["grpo"].values():
        cell |= {"accuracy": 50 / 60, "correct": 50}


def of_the_other(run: RunDir, made: dict[str, Path], files: str) -> None:
    """Files of the strong run's evaluation in place of the weak one's."""
    for file in (made["strong"] / "run").glob(files):
        shutil.copy(file, run.path / file.relative_to(made["strong"] / "run"))


def exchange(run: RunDir, one: tuple[str, str], other: tuple[str, str]) -> None:
    for place in (records_file, meta_file):
        a, b = place(run.path / "eval", *one), place(run.path / "eval", *other)
        first, second = a.read_bytes(), b.read_bytes()
        a.write_bytes(second)
        b.write_bytes(first)
    follow(run)


def solved_only(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["correct"]]


def right_twice(rows: list[dict]) -> list[dict]:
    right = solved_only(rows)
    return (right * 3)[: len(rows)]


RIGHT = {"correct": True, "correct_strict": True}
ALL = tuple(CELLS)
RESULTS: dict[str, Callable[[RunDir, dict], None]] = {
    "gain raised": lambda run, made: edit_result(run, passing),
    "gain raised, without a new checksum": lambda run, made: edit_result(run, passing, careful=False),
    "accuracies and gain raised": lambda run, made: edit_result(run, lambda r: (passing(r), accuracies(r))),
    "rates of GRPO made good": lambda run, made: edit_result(
        run, lambda r: (passing(r), [cell.update(undecided_rate=0.0) for cell in r["matrix"]["grpo"].values()])
    ),
    "eval.json of another run": lambda run, made: of_the_other(run, made, "eval.json"),
    "eval.json and completions of another run": lambda run, made: (
        of_the_other(run, made, "eval*/*") or of_the_other(run, made, "eval.json")
    ),
    "GRPO's completions of another run": lambda run, made: of_the_other(run, made, "eval/grpo-*") or follow(run),
    "base and GRPO exchanged": lambda run, made: (
        exchange(run, ("base", "fp8"), ("grpo", "fp8")),
        exchange(run, ("base", "bf16"), ("grpo", "bf16")),
    ),
    "bf16's completions as fp8's": lambda run, made: exchange(run, ("grpo", "bf16"), ("grpo", "fp8")),
    "verdicts set right": lambda run, made: edit_records(run, each(lambda row: RIGHT)),
    "verdicts set right, hashes left": lambda run, made: edit_records(run, each(lambda row: RIGHT), careful=False),
    "verdicts and answers set right": lambda run, made: edit_records(
        run, each(lambda row: {**RIGHT, "answer": row["gold"]})
    ),
    "the base's verdicts set wrong": lambda run, made: edit_records(
        run,
        each(lambda row: {"correct": False, "correct_strict": False}),
        cells=(("base", "bf16"), ("base", "fp8")),
    ),
    "wrong answers left undecided": lambda run, made: edit_records(
        run, each(lambda row: {} if row["correct"] else {"correct": None, "correct_strict": None})
    ),
    "references changed to the answers": lambda run, made: edit_records(
        run, each(lambda row: {**RIGHT, "gold": row["answer"]})
    ),
    "the judged text changed": lambda run, made: edit_records(
        run, each(lambda row: {"text": f"\\boxed{{{row['gold']}}}"})
    ),
    "one verdict of sixty set right": lambda run, made: edit_records(run, lambda rows: [*rows[:-1], rows[-1] | RIGHT]),
    "only the solved problems kept": lambda run, made: edit_records(run, solved_only),
    "only the solved problems kept, of every cell": lambda run, made: edit_records(run, solved_only, ALL),
    "solved problems repeated": lambda run, made: edit_records(run, right_twice),
    "solved problems repeated, of every cell": lambda run, made: edit_records(run, right_twice, ALL),
    "half the problems left out of every cell": lambda run, made: edit_records(run, lambda rows: rows[:30], ALL),
    "problems in another order": lambda run, made: edit_records(run, lambda rows: rows[::-1], ALL),
    "one problem exchanged for a copy of another": lambda run, made: edit_records(
        run, lambda rows: [*rows[:-1], rows[0]], ALL
    ),
    "two completions of each problem": lambda run, made: edit_records(
        run, lambda rows: [row | {"sample": n} for row in rows for n in (0, 1)], ALL
    ),
    "completions missing": lambda run, made: records_file(run.path / "eval", "grpo", "fp8").unlink(),
    "headers missing": lambda run, made: meta_file(run.path / "eval", "grpo", "bf16").unlink(),
    "no completions at all": lambda run, made: shutil.rmtree(run.path / "eval"),
    "header edited by hand": lambda run, made: (header := meta_file(run.path / "eval", "grpo", "fp8")).write_text(
        header.read_text().replace('"seed": 0', '"seed": 1')
    ),
    "completions longer than the limit": lambda run, made: edit_records(run, each(lambda row: {"tokens": 9999}), ALL),
}


@pytest.mark.parametrize("attack", RESULTS)
def test_no_edited_result_promotes_a_checkpoint_that_gained_nothing(copied, made, attack):
    run = copied("weak")
    RESULTS[attack](run, made)
    with pytest.raises((BadInput, CheckFailed)):
        decide(run)
    assert not promoted(run)


SETTINGS = {
    "eval.temperature": 1.0,
    "eval.max_new_tokens": 4096,
    "eval.samples": 4,
    "eval.seed": 7,
    "eval.stop": ["END"],
    "eval.reward": "math_lenient",
    "eval.reward_threshold": 0.1,
    "data.system_prompt": "The answer is often 7.",
    "data.prompt_suffix": " Think twice.",
    "data.chat_template_kwargs": {"enable_thinking": True},
    "data.eval_path": "easy.jsonl",
    "data.answer_format": "gsm8k",
    "reward.options": {"math": {"tolerance": 10}},
    "problems": "0" * 32,
    "weights.artifact": "0" * 32,
}


@pytest.mark.parametrize("key", SETTINGS)
def test_completions_that_were_made_otherwise_promote_nothing(copied, key):
    run = copied("strong")
    edit_header(run, key, SETTINGS[key])
    with pytest.raises(BadInput, match=rf"is of another measurement than the gate is about: {key}"):
        decide(run)
    assert not promoted(run)


def swap(run: RunDir, made: dict[str, Path], *cells: tuple[str, str]) -> None:
    for cell in cells:
        place = run.merged.joinpath(*cell)
        shutil.rmtree(place)
        shutil.copytree(made["weak"] / "run" / "merged" / cell[0] / cell[1], place)


def edit_manifest(run: RunDir, careful: bool = False, **facts: Any) -> None:
    file = run.merged / "grpo" / "fp8" / MANIFEST
    text = json.loads(file.read_text()) | facts
    file.write_text(json.dumps(text))
    if careful:
        write_record(file, text)


ARTIFACTS: dict[str, Callable[[RunDir, dict], object]] = {
    "another run's fp8": lambda run, made: swap(run, made, ("grpo", "fp8")),
    "another run's bf16": lambda run, made: swap(run, made, ("grpo", "bf16")),
    "another run's base": lambda run, made: swap(run, made, ("base", "fp8"), ("base", "bf16")),
    "another run's checkpoints": lambda run, made: swap(run, made, *CELLS),
    "weights exchanged under the manifest": lambda run, made: shutil.copy(
        run.merged / "base" / "fp8" / "model.safetensors", run.merged / "grpo" / "fp8" / "model.safetensors"
    ),
    "config.json edited": lambda run, made: (run.merged / "grpo" / "fp8" / "config.json").write_text("[]"),
    "an adapter beside the weights": lambda run, made: (
        run.merged / "grpo" / "fp8" / "adapter_model.safetensors"
    ).write_bytes(b"x"),
    "a template beside the weights": lambda run, made: (
        run.merged / "grpo" / "fp8" / "chat_template.jinja"
    ).write_text("{{ 7 }}"),
    "a KL edited by hand": lambda run, made: edit_manifest(run, verify={"mean_kl": 0.0}),
    "a promotion written by hand": lambda run, made: edit_manifest(run, promoted=True),
    "an adapter version edited": lambda run, made: edit_manifest(run, careful=True, adapter_hash="0" * 64),
    "the gate's margin edited in the run": lambda run, made: run.config_file.write_text(
        run.config_file.read_text().replace('"max_quantization_loss": 0.2', '"max_quantization_loss": 0.9')
    ),
    "base.json edited": lambda run, made: run.base_file.write_text(run.base_file.read_text().replace("bbbb", "cccc")),
}


@pytest.mark.parametrize("attack", ARTIFACTS)
def test_no_other_checkpoint_is_promoted_by_an_evaluation(copied, made, attack):
    run = copied("strong")
    ARTIFACTS[attack](run, made)
    with pytest.raises((BadInput, CheckFailed)):
        decide(run)


ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff\u00ad"
LATIN_TO_CYRILLIC = str.maketrans("aeocpx", "\u0430\u0435\u043e\u0441\u0440\u0445")
DISGUISES: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "upper case": str.upper,
    "swapped case": str.swapcase,
    "spaces doubled": lambda text: text.replace(" ", "  "),
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "line breaks": lambda text: text.replace(". ", ".\n\n"),
    "numbered": lambda text: f"17. {text}",
    "numbered in brackets": lambda text: f"(3) {text}",
    "called a problem": lambda text: f"Problem 12: {text}",
    "a letter in front": lambda text: f"b) {text}",
    "a question mark more": lambda text: f"{text}??",
    "without punctuation": lambda text: text.replace(",", "").replace(". ", " ").rstrip(".?"),
    "other punctuation": lambda text: text.replace(",", ";").replace("?", "!"),
    "quoted": lambda text: f"\u201c{text}\u201d",
    "in bold": lambda text: f"**{text}**",
    "zero-width characters": lambda text: ZERO_WIDTH[0].join(text),
    "all zero-width characters": lambda text: "".join(
        sign + ZERO_WIDTH[at % len(ZERO_WIDTH)] for at, sign in enumerate(text)
    ),
    "lookalike letters": lambda text: text.translate(LATIN_TO_CYRILLIC),
    "full-width letters": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" < c < "~" else c for c in text),
    "mathematical letters": lambda text: "".join(chr(0x1D41A + ord(c) - 97) if "a" <= c <= "z" else c for c in text),
    "accents": lambda text: text.replace("e", "e\u0301").replace("a", "a\u0308"),
    "Arabic digits": lambda text: "".join(chr(0x660 + int(c)) if c.isdigit() else c for c in text),
    "hyphens between words": lambda text: text.replace("decimal number", "decimal-number").replace("in the", "in-the"),
    "LaTeX spaced": lambda text: text.replace("\\times", "\\,\\times\\;").replace(" + ", "\\ +\\quad "),
    "LaTeX in other delimiters": lambda text: text.replace(" $", " \\(").replace("$.", "\\)."),
    "LaTeX of another look": lambda text: (
        text.replace("\\dfrac", "\\frac").replace("\\left(", "(").replace("\\right)", ")")
    ),
    "another sign for times": lambda text: text.replace("\\times", "\\cdot"),
    "sentences in another order": lambda text: " ".join([*text.split(". ")[1:], text.split(". ")[0] + "."]),
    "words around it": lambda text: f"Please solve this with care. {text} Explain your reasoning.",
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_held_out_problem_in_disguise_among_the_training_problems_is_found(copied, disguise):
    run = copied("strong")
    test, train = (run.path.parent / f"{split}.jsonl" for split in ("test", "train"))
    rows = [json.loads(line) for line in test.read_text().splitlines()]
    hidden = [row | {"question": DISGUISES[disguise](row["question"])} for row in rows[6:8]]
    with open(train, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in hidden)
    with pytest.raises(CheckFailed, match="2 of 60 held-out problems are training problems"):
        decide(run)
    assert not promoted(run)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 + 4?", "What is 3 - 4?"),
        ("What is 12 + 4?", "What is 1 2 + 4?"),
        ("Find x - y for the pair.", "Find xy for the pair."),
        ("What is 2.5 + 1?", "What is 25 + 1?"),
        ("Compute (3 + 4) * 5.", "Compute 3 + (4 * 5)."),
        ("What is f(x) + 1?", "What is f(y) + 1?"),
        ("Tom has 3 pens. Ann has 4 pens. How many has Tom?", "Ann has 3 pens. Tom has 4 pens. How many has Tom?"),
        ("Solve \\frac{1}{2} x = 3", "Solve \\frac{2}{1} x = 3"),
        ("5. What is the sum?", "What is the sum of 5?"),
        ("-3 + 4", "3 + 4"),
    ],
)
def test_different_problems_are_not_taken_for_disguised_copies(one, other):
    assert find_leaks([SimpleNamespace(question=one)], [SimpleNamespace(question=other)]) == []


def replace_ledger(run: RunDir, change: Callable[[list[dict]], list[dict]], careful: bool = True) -> None:
    rows = [json.loads(line) for line in run.ledger_file.read_text().splitlines()]
    lines = change(rows)
    run.ledger_file.write_text("".join((line_of(row) if careful else json.dumps(row)) + "\n" for row in lines))


LEDGERS: dict[str, Callable[[RunDir], object]] = {
    "a line removed": lambda run: replace_ledger(run, lambda rows: rows[:2] + rows[3:]),
    "the last line removed": lambda run: replace_ledger(run, lambda rows: rows[:-1]),
    "removed": lambda run: run.ledger_file.unlink(),
    "emptied": lambda run: run.ledger_file.write_text(""),
    "ids removed, with new checksums": lambda run: replace_ledger(
        run, lambda rows: [row | {"problem_ids": row["problem_ids"][:1]} for row in rows]
    ),
    "ids removed, with old checksums": lambda run: replace_ledger(
        run, lambda rows: [row | {"problem_ids": []} for row in rows], careful=False
    ),
    "without checksums": lambda run: replace_ledger(
        run, lambda rows: [{"step": row["step"], "problem_ids": []} for row in rows], careful=False
    ),
}


@pytest.mark.parametrize("attack", LEDGERS)
def test_a_ledger_that_was_edited_to_hide_problems_promotes_nothing(copied, attack):
    run = copied("strong")
    LEDGERS[attack](run)
    with pytest.raises(BadInput, match=r"ledger\.jsonl"):
        decide(run)
    assert not promoted(run)


def test_training_data_that_was_exchanged_after_the_training_promotes_nothing(copied):
    run = copied("strong")
    train = run.path.parent / "train.jsonl"
    write_rows(train, questions(8, 900))
    with pytest.raises(CheckFailed, match=r"ledger.jsonl lists 8 problems, .* the training data no longer has"):
        decide(run)
    assert not promoted(run)


def test_limits_that_the_gate_was_given_are_printed_and_recorded_with_the_promotion(copied, capsys):
    run = copied("strong")
    assert decide(run, "--eval.gate.max_quantization_loss", "0.3") == 0
    assert "eval.gate.max_quantization_loss is 0.2 in the run's configuration, and the gate was asked with 0.3" in (
        capsys.readouterr().out
    )
    promotion = read_manifest(run.merged / "grpo" / "fp8")["promotion"]
    assert promotion["changed_limits"] == {"max_quantization_loss": [0.2, 0.3]}
    assert promotion["limits"]["max_quantization_loss"] == 0.3


def test_copies_of_a_completion_do_not_make_a_gain_more_certain(copied):
    """As if a seed had been used for several samples: the interval is over problems, not over completions."""
    from eval.cells import read_records

    run = copied("weak")
    records = {cell: read_records(records_file(run.path / "eval", *cell)) for cell in CELLS}
    repeated = {
        cell: [dataclasses.replace(row, sample=n) for row in rows for n in range(8)] for cell, rows in records.items()
    }
    once, eight = (compare(found, ["bf16", "fp8"], "fp8", 2000)["gain"]["fp8"] for found in (records, repeated))
    assert eight["difference"] == pytest.approx(once["difference"]) and eight["n"] == once["n"]
    assert eight["interval"][1] - eight["interval"][0] >= 0.9 * (once["interval"][1] - once["interval"][0])


def test_verdicts_of_a_reward_that_is_no_comparison_are_taken_as_stored(copied):
    config = gate.run_config(copied("strong"), [])
    assert recheck.is_judged_again(config)
    other = dataclasses.replace(config, eval=dataclasses.replace(config.eval, reward="my_rewards:polite"))
    assert not recheck.is_judged_again(other)


def test_there_are_at_least_sixty_attacks():
    assert len(RESULTS) + len(SETTINGS) + len(ARTIFACTS) + len(DISGUISES) + len(LEDGERS) >= 60
