"""`python -m reward audit`: each signature, planted in a healthy run, is found alone; a healthy run has none."""

import json
import shutil

import pytest

from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from reward.__main__ import main
from reward.audit import TEXTS, TRENDS, audit, is_loop, read_trace

STEPS = 20
SAMPLED = (1, 5, 10, 15, 20)
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hal")
ECHO = "Take the numbers of the question one by one and add them up. Put the final answer in \\boxed{}."


def healthy_row(step, problem, sample):
    first, second = 10 + problem, 20 + 3 * step
    name = NAMES[(problem + step) % len(NAMES)]
    text = f"{name} has {first} and gets {second}. Version {sample}: {first} + {second} = {first + second}. "
    return {
        "problem_id": f"p{step}-{problem}",
        "prompt": f"{name} has {first} apples and gets {second} more. How many? {ECHO}",
        "completion": text + f"\\boxed{{{first + second + sample % 2}}}",
        "rewards": {"math": float(sample % 2 == 0), "boxed_format": 1.0},
        "advantage": 0.5,
    }


def write_run(path, metrics=lambda step: {}, change=lambda row, step: row, evaluation=None):
    """A run of 20 steps, 4 problems x 4 samples at five of them; `metrics` and `change` plant a signature."""
    run = RunDir(path)
    run.completions.mkdir(parents=True)
    run.config_file.write_text('{"config": {}}')
    steps = []
    for step in range(1, STEPS + 1):
        row = {"step": step, "reward": 0.3 + 0.02 * step, "completion_length": 200 - step, "masked_fraction": 0.0}
        steps.append({**row, "unknown_rewards": {"math": {}}, **metrics(step)})
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in steps))
    for step in SAMPLED:
        rows = [change(healthy_row(step, problem, i), step) for problem in range(4) for i in range(4)]
        (run.completions / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if evaluation is not None:
        gain = {"difference": evaluation[0], "interval": evaluation[1:], "n": 300, "discordant": [1, 2]}
        gain["minimum_detectable_effect"] = 0.1
        result = {"matrix": {"base": {}, "grpo": {}}, "gain": {"bf16": gain}, "gain_survival": {}, "n": 300}
        run.eval_file.write_text(json.dumps(result | {"quantization_loss": {}, "conclusion": ""}))
    return path


def late(**changes):
    """Change rows from step 15 on."""

    def change(row, step):
        made = {key: value(row) if callable(value) else value for key, value in changes.items()}
        return {**row, **made} if step >= 15 else row

    return change


def boxed(row):
    return "\\boxed" + row["completion"].split("\\boxed")[1]


PAID = {"math": 1.0}
COPY = "We count all of it, twice, and find at last for problem {} that it is \\boxed{{9}}."
PLANTED = {
    "length collapse": {"metrics": lambda step: {"completion_length": 200 / step}},
    "undecided answers": {"metrics": lambda step: {"masked_fraction": 0.0 if step < 10 else 0.08}},
    "held-out stays": {"evaluation": [0.01, -0.03, 0.05]},
    "copies in groups": {"change": late(completion=lambda row: COPY.format(row["problem_id"]))},
    "the same string": {"change": late(completion="As everybody knows, the answer is good.", rewards=PAID)},
    "form without content": {"change": late(completion=boxed, rewards=PAID)},
    "repetition": {"change": late(completion=lambda row: row["completion"] + " wait, let me see again," * 60)},
    "prompt echo": {"change": late(completion=lambda row: f"{row['prompt']} ok {row['completion'][-30:]}")},
    "several answers": {"change": late(completion=lambda row: f"{row['completion']} or \\boxed{{1}}")},
}


def test_a_healthy_run_shows_no_signature(tmp_path, capsys):
    assert len(PLANTED) + 1 == len(TRENDS) + len(TEXTS)  # "the same answer" needs more problems, below
    assert main(["audit", str(write_run(tmp_path / "run", evaluation=[0.3, 0.2, 0.4]))]) == 0
    assert capsys.readouterr().out == "0 of 10 signatures in 20 steps and 16 late completions\n"


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_signature_is_found_with_numbers_and_examples(tmp_path, capsys, name):
    path = write_run(tmp_path / "run", **PLANTED[name])
    assert main(["audit", str(path), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["found"]
    assert finding["signature"] == name
    assert any(sign.isdigit() for sign in finding["numbers"]) and finding["meaning"]
    assert len(finding["examples"]) <= 3
    assert finding["examples"] or name in ("held-out stays", "undecided answers")
    assert main(["audit", str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{name}: {finding['numbers']}")


def test_one_answer_to_all_problems_is_found(tmp_path):
    change = late(completion=lambda row: row["completion"].split("\\boxed")[0] + "\\boxed{4}")
    trace = read_trace(write_run(tmp_path / "run", change=change))
    many = [{**row, "problem_id": f"{row['problem_id']}-{i % 4}"} for i, row in enumerate(trace.late)]
    found = audit(type(trace)(trace.steps, trace.early, many, None))
    assert [finding.signature for finding in found] == ["the same answer"]
    assert "'4' is an answer to 16 of 16 late problems" in found[0].numbers


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("the same words again " * 20, True),
        ("ab" * 400, True),
        ("我们再算一次" * 100, True),
        (" ".join(str(n) for n in range(100)), False),
        ("First we add 2 and 5, which makes 7; then we take 5 away again and are back at 2.", False),
        ("", False),
    ],
)
def test_loops_are_told_from_texts(text, loops):
    assert is_loop(text) is loops


def test_what_could_not_be_looked_at_is_said(tmp_path, capsys):
    path = write_run(tmp_path / "run")
    run = RunDir(path)
    run.metrics_file.write_text("".join(run.metrics_file.read_text().splitlines(keepends=True)[:5]))
    shutil.rmtree(run.completions)
    assert main(["audit", str(path)]) == 0
    out = capsys.readouterr().out
    assert "not checked: trends (fewer than 8 steps" in out
    assert "not checked: texts (0 sampled completions" in out
    assert "not checked: held-out accuracy (no eval.json" in out


def test_a_line_cut_short_at_the_end_is_passed_over_and_one_in_the_middle_is_not(tmp_path):
    run = RunDir(write_run(tmp_path / "run"))
    whole = run.metrics_file.read_text()
    run.metrics_file.write_text(whole + '{"step": 21, "rew')
    assert len(read_trace(run.path).steps) == STEPS
    run.metrics_file.write_text('{"step": 0, "rew\n' + whole)
    with pytest.raises(BadInput, match=r"metrics.jsonl:1 is damaged: it is not JSON"):
        read_trace(run.path)


def test_what_is_no_run_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no run directory"):
        main(["audit", str(tmp_path / "none")])
    with pytest.raises(BadInput, match=r"no config.json"):
        main(["audit", str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="has not taken a step"):
        main(["audit", str(tmp_path)])
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions/step-000001.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(BadInput, match=r"000001\.jsonl:1 is not a logged completion: problem_id is missing"):
        main(["audit", str(tmp_path)])


def test_a_real_run_shows_no_signature(tiny_run, capsys):
    assert main(["audit", str(tiny_run.path)]) == 0
    assert "0 of 10 signatures in 6 steps" in capsys.readouterr().out
