"""Near-copies of a problem are on its side of a split, whatever the order, the seed and the sizes."""

import itertools
import json
import os
import random
import re
import string
from pathlib import Path

import pytest

from kit.data.near_copies import groups, nearest, shingles
from tests.conftest import ROOT

NAMES = ["Ann", "Bob", "Cleo", "Dora", "Emil", "Faye"]
ENDS = ["How many are left in the end?", "What was the total at the start?", "By how much did it change in all?"]


def story(number: int) -> str:
    """A template of words that no other story has, with a name and two numbers to fill in."""
    rng = random.Random(number)
    words = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(14)]
    return f"{{who}} {' '.join(words[:7])} {{a}} {' '.join(words[7:])} {{b}} today."


def variants(stories: int = 20, each: int = 5, seed: int = 0) -> list[dict]:
    """Shuffled rows with `each` variants of every story: other names, other numbers, another question."""
    rng = random.Random(seed)
    rows = []
    for number in range(stories):
        for _ in range(each):
            text = story(number).format(who=rng.choice(NAMES), a=rng.randrange(2000), b=rng.randrange(100))
            rows.append({"question": f"{text} {rng.choice(ENDS)}", "answer": len(rows), "story": number})
    rng.shuffle(rows)
    return rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def command(recipe):
    """`command(*words)`: split_problems in this process."""
    return lambda *words: recipe([str(word) for word in words], "recipes/split_problems.py")


@pytest.mark.parametrize(("seed", "heldout"), [(0, 25), (1, 25), (2, 40), (3, 7)])
def test_variants_of_a_story_are_on_one_side(command, tmp_path, read_jsonl, seed, heldout):
    rows = variants(seed=seed)
    done = command(
        write(tmp_path / "all.jsonl", rows), "--out", tmp_path / "out", "--heldout", heldout, "--seed", seed
    )
    assert done.code == 0, done.err
    of_story = {row["question"]: row["story"] for row in rows}
    sides = {name: read_jsonl(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "heldout")}
    stories = {name: {of_story[row["question"]] for row in side} for name, side in sides.items()}
    assert stories["train"] & stories["heldout"] == set()
    questions = [row["question"] for side in sides.values() for row in side]
    assert sorted(questions) == sorted(of_story), "no problem is lost or repeated"
    assert heldout - 5 < len(sides["heldout"]) <= heldout, "whole groups of at most five, and no more than asked for"
    answers = {row["question"]: str(row["answer"]) for row in rows}
    assert all(row["answer"] == answers[row["question"]] for side in sides.values() for row in side)
    assert f"{len(rows)} problems in 20 groups, the largest of 5" in done.out
    left = re.search(r"nearest training problem: .* largest (0\.\d\d)", done.out)
    assert float(left[1]) < 0.4


def similarity(left: set, right: set) -> float:
    return len(left & right) / min(len(left), len(right))


@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.7, 1.0])
def test_no_two_groups_hold_problems_as_similar_as_the_threshold(threshold):
    rng = random.Random(5)
    words = [f"w{letter}" for letter in string.ascii_lowercase[:12]]
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 9))) for _ in range(120)]
    found, sets = groups(texts, threshold), shingles(texts)
    assert sorted(itertools.chain(*found)) == list(range(len(texts)))
    for one, other in itertools.combinations(found, 2):
        assert all(similarity(sets[i], sets[j]) < threshold for i in one for j in other)
    for group in found:
        for index in group if len(group) > 1 else ():
            assert max(similarity(sets[index], sets[other]) for other in group if other != index) >= threshold
    best = nearest(texts[:40], texts[40:])
    for index, (value, other) in enumerate(best):
        exact = max(similarity(sets[index], one) for one in sets[40:])
        assert value == pytest.approx(exact, abs=1e-6)
        assert other is None or similarity(sets[index], sets[40 + other]) == pytest.approx(exact)


def test_numbers_and_names_make_no_difference_and_other_words_do():
    one = "Philip's 87 oranges cost $ 2.50 each. How much do they cost?"
    same = "Mia's 1,290 oranges cost $ 31 each. How much do they cost?"
    other = "Philip's 87 oranges weigh $ 2.50 in all. Who carries them?"
    first, second, third = shingles([one, same, other])
    assert first == second and similarity(first, third) < 0.5


def test_the_same_split_comes_out_again_and_another_seed_draws_others(command, tmp_path):
    file = write(tmp_path / "all.jsonl", variants())
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert command(file, "--out", tmp_path / name, "--heldout", 30, "--seed", seed).code == 0
    content = {name: {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "abc"}
    assert content["a"] == content["b"]
    assert content["a"]["heldout.jsonl"] != content["c"]["heldout.jsonl"]


def test_the_columns_of_svamp_are_found(command, tmp_path, read_jsonl):
    rows = [
        {"Body": row["question"].partition(". ")[0], "Question": row["question"].partition(". ")[2], "Answer": 3.0}
        for row in variants()
    ]
    done = command(write(tmp_path / "svamp.jsonl", rows), "--out", tmp_path / "out", "--heldout", 30)
    assert done.code == 0, done.err
    first = read_jsonl(tmp_path / "out" / "train.jsonl")[0]
    assert first["answer"] == "3.0" and ". " in first["question"] and first["question"].endswith("?")


def test_an_overlap_with_given_training_problems_is_counted_and_nothing_is_written(command, tmp_path):
    rows = [{**row, "answer": f"so\n#### {row['answer']}"} for row in variants(stories=10, each=2)]
    test, train = [rows[0], *rows[10:]], [{**rows[0], "answer": "#### 1"}]
    files = write(tmp_path / "test.jsonl", test), write(tmp_path / "train.jsonl", train)
    done = command(files[0], "--against", files[1], "--answer_format", "gsm8k")
    assert done.code == 0, done.err
    twins = sum(row["story"] == rows[0]["story"] for row in test)
    assert f"0.4 or more: {twins} (" in done.out and "1.0 or more: 1 (" in done.out
    assert f"1.00  {files[0]}:1  {files[1]}:1" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["FILE"], "name either --out, the directory to write, or --against"),
        (["--out", "OUT"], "name either a file with problems, or a data set of the hub with --id"),
        (["FILE", "--out", "OUT", "--similarity", "0"], "--similarity (0) must be above 0 and at most 1"),
        (["FILE", "--out", "OUT", "--heldout", "1"], "no split: 0 of 20 problems would be held out (groups: 4"),
        (["FILE", "--out", "OUT", "--heldout", "20"], "no split: 20 of 20 problems would be held out"),
        (["FILE", "--out", "OUT", "--question_column", "quest"], "has no column 'quest'"),
        (["NONE", "--out", "OUT"], "none.jsonl does not exist"),
        (["--id", "ChilleD/SVAMP", "--out", "OUT"], "cannot load data.id 'ChilleD/SVAMP'"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(command, tmp_path, words, message):
    file = write(tmp_path / "all.jsonl", variants(stories=4))
    named = {"FILE": file, "OUT": tmp_path / "out", "NONE": tmp_path / "none.jsonl"}
    done = command(*(named.get(word, word) for word in words))
    assert done.code == 2
    assert message in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]


def test_the_bodies_of_svamp_are_on_one_side_each(command, tmp_path, read_jsonl):
    source = Path(os.environ.get("GRPO_KIT_DATA", ROOT.parent / "shared" / "data")) / "svamp" / "test.jsonl"
    if not source.is_file():
        pytest.skip(f"needs {source}")
    done = command(source, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "1,000 problems in " in done.out and "heldout  300 problems" in done.out

    def bodies(name: str) -> set[str]:
        rows = read_jsonl(tmp_path / "out" / f"{name}.jsonl")
        return {re.sub(r"[\d.]+", "#", row["question"].rpartition(". ")[0].lower()) for row in rows}

    train, heldout = bodies("train"), bodies("heldout")
    assert len(heldout) > 50 and train & heldout == set()
