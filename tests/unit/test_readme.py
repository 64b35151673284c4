"""Every command in a README, a YAML header or a docstring is one that the kit runs."""

import re
from pathlib import Path

import pytest

from tests.unit.command_lines import (
    ROOT,
    in_comments,
    in_docstring,
    in_markdown,
    problem,
    program,
)

HIDDEN = ("runs", "models")


def files(pattern: str) -> list[Path]:
    """Files of the checkout, without hidden folders, environments and what runs write."""
    found = (path for path in ROOT.rglob(pattern) if not path.is_symlink())
    parts = ((path, path.relative_to(ROOT).parts) for path in found)
    return sorted(
        path for path, names in parts if names[0] not in HIDDEN and not any(n.startswith(".") for n in names)
    )


DOCUMENTS = [
    *((path, in_markdown) for path in files("*.md")),
    *((path, in_comments) for path in files("*.yaml")),
    *((path, in_docstring) for path in files("*.py")),
]
COMMANDS = [command for path, read in DOCUMENTS for command in read(path)]


def test_commands_are_found_where_they_are_known_to_stand():
    written = {(command.where.split(":")[0], program(list(command.words))) for command in COMMANDS}
    assert {
        ("merge/README.md", "python"),
        ("eval/README.md", "python"),
        ("reward/README.md", "pytest"),
        ("recipes/README.md", "python"),
        ("recipes/grpo_qlora.py", "accelerate"),
        ("recipes/tiny_base.py", "python"),
        ("recipes/configs/grpo-tiny-nf4-cpu.yaml", "accelerate"),
        ("accelerate_configs/two_nodes.yaml", "accelerate"),
    } <= written
    # With its continuation line, and without the assignment before it.
    assert any(
        command.words[:2] == ("accelerate", "launch")
        and command.words[-2:] == ("--config", "recipes/configs/grpo-tiny-nf4-cpu.yaml")
        for command in COMMANDS
        if command.where.startswith("recipes/configs/grpo-tiny-nf4-cpu.yaml")
    )


@pytest.mark.parametrize("document", sorted({command.where.split(":")[0] for command in COMMANDS}))
def test_every_command_is_one_that_runs(document):
    found = [problem(command) for command in COMMANDS if command.where.split(":")[0] == document]
    assert [text for text in found if text] == []


def read(tmp_path: Path, text: str) -> list:
    (tmp_path / "README.md").write_text(text)
    return list(in_markdown(tmp_path / "README.md"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("python -m mrege --run runs/tiny --format bf16", "no module mrege"),
        ("python -m merge.quantise", "no module merge.quantise"),
        ("python -m merge --run runs/tiny --formats bf16", "--format"),
        ("python -m merge --run runs/tiny --format fp9", "invalid choice: 'fp9'"),
        ("python -m merge --run runs/tiny --form bf16", "--form"),
        ("python -m launch.watch", "required: run"),
        ("python -m launch.watch runs/tiny --plots", "unrecognized arguments: --plots"),
        ("python -m recipes.quickstart --seed one", "invalid int value"),
        ("python -m reward.bench --fast", "unrecognized arguments: --fast"),
        ("python -m eval gat --run runs/tiny", "unknown argument gat"),
        ("python -m eval gate --run runs/tiny --eval.gate.min_gian 0", "Did you mean eval.gate.min_gain"),
        ("python recipes/grpo.py --config recipes/configs/grpo-tiny-nf4-cpu.yaml", "no file recipes/grpo.py"),
        ("python recipes/grpo_qlora.py --config recipes/configs/none.yaml", "no config file"),
        ("python recipes/grpo_qlora.py --config recipes/configs/grpo-tiny-nf4-cpu.yaml --dryrun", "--dry_run"),
        ("python recipes/grpo_qlora.py --config recipes/configs/grpo-tiny-nf4-cpu.yaml --train.beta x", "a number"),
        ("accelerate launch --config_file accelerate_configs/gpu.yaml recipes/grpo_qlora.py --config …", "gpu.yaml"),
        ("accelerate launch --config_fiel accelerate_configs/cpu.yaml recipes/grpo_qlora.py", "--config_fiel"),
        ("accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py", "no file recipes/grpo.py"),
        (
            "accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes two recipes/grpo_qlora.py",
            "int",
        ),
        ("accelerate lunch --config_file accelerate_configs/cpu.yaml recipes/grpo_qlora.py", "not accelerate launch"),
        ("kit trian my.yaml", "unknown command trian. Did you mean train?"),
        ("kit train my.yaml --dryrun", "--dry_run"),
        ("kit plan grpo-tinny-nf4-cpu", "Did you mean grpo-tiny-nf4-cpu"),
        ("kit merge --run runs/tiny --format fp9", "invalid choice: 'fp9'"),
        ("make quikstart", "no make target quikstart"),
        ("make test DEVISE=cpu", "no variable DEVISE"),
        ("pytest tests/smoke/test_gsm8.py", "no file tests/smoke/test_gsm8.py"),
        ("pytest tests/smoke/test_gsm8k.py::test_nothing", "no test test_nothing"),
        ("pyhton -m merge --run runs/tiny --format bf16", "unknown program 'pyhton', near 'python'"),
        ("tial -f runs/tiny/metrics.jsonl", "unknown program 'tial', near 'tail'"),
        ("cat recipes/configs/none.yaml", "no file recipes/configs/none.yaml"),
        ("vllm serve models/base --logprob-mode processed_logprobs", "--logprob-mode"),
        ("vllm serve models/base --logprobs-mode processed", "invalid choice: 'processed'"),
        ("OMP_NUM_THREADS=1 make test && make instal", "no make target instal"),
        ("make test && make instal  # comment", "no make target instal"),
    ],
)
def test_a_planted_typo_is_found(tmp_path, line, complaint):
    commands = read(tmp_path, f"# Title\n\nText.\n\n```bash\n{line}\n```\n")
    found = [text for text in map(problem, commands) if text]
    assert len(found) == 1
    assert found[0].startswith("README.md:6: ")
    assert complaint in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "    python -m mrege --run runs/tiny",
        "Run `python -m mrege --run runs/tiny` first.",
        "```\npython -m mrege --run runs/tiny\n```",
        "```\n$ python -m mrege \\\n    --run runs/tiny\nsome output\n```",
        "```console\n$ python -m mrege --run runs/tiny\nsome output\n```",
        "```\npyhton -m merge --run runs/tiny --format bf16\n```",
    ],
    ids=["indented", "inline", "fenced", "prompt", "console", "misspelled program"],
)
def test_a_typo_is_found_wherever_a_command_can_stand(tmp_path, text):
    assert [command.words[:2] for command in read(tmp_path, text) if problem(command)] in (
        [("python", "-m")],
        [("pyhton", "-m")],
    )


def test_right_commands_and_text_that_is_none_are_left_alone(tmp_path):
    text = """
```bash
OMP_NUM_THREADS=1 python -m eval --run runs/<name> --eval.temperature=1.0 > log.txt 2>&1   # a comment
tail -f runs/tiny/logs/trainer.log | grep -o 'reward [0-9.]*'
python3 -m venv .venv && .venv/bin/pip install -r requirements-cpu.txt
for i in 0 1; do VLLM_X=1 vllm serve models/base --port $((8000 + i)) > $i.log & done; wait
python -m merge --run … --format bf16 && python recipes/grpo_qlora.py …
```
```
step 1/80 reward 0.422 std 0.498
runs/tiny/   metrics.jsonl
make a model, then train it
```
We make the model `runs/tiny/none.yaml`; `make test` runs `metrics.jsonl` and `None of it`.
"""
    commands = read(tmp_path, text)
    assert [program(list(command.words)) for command in commands] == [
        *("python", "tail", "grep", "python", "pip", "vllm", "wait", "python", "python", "make")
    ]
    assert [text for text in map(problem, commands) if text] == []


def test_readme_has_every_figure_and_names_the_two_commands():
    readme = ROOT / "README.md"
    text = readme.read_text()
    assert re.findall(r"@[A-Z]+@", text) == [], "a figure was never filled in"
    assert {"make quickstart", "make test"} <= {command.text for command in in_markdown(readme)}


@pytest.mark.parametrize("document", files("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    assert [t for t in targets if "://" not in t and not (document.parent / t).exists()] == []
