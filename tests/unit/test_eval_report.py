"""`python -m eval report`: what is in the page, what of it is escaped, and that it stands alone."""

import base64
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval import page as report_page
from eval import plots
from eval.artifacts import artifact_hash
from eval.document import Bullets, Commands, Document, Missing, Section, Table, Text, to_html, to_markdown
from kit.core.errors import BadInput
from kit.core.formats import FORMATS
from kit.core.run_directory import RunDir, write_json, write_manifest
from kit.core.run_files import read_json

HOSTILE = (
    "</td><script>alert('x')</script><img src=x onerror=alert(1)> a|b ![p](http://evil.example/x) `c` \x00\x1b[31m"
)
HOSTILE += " $x$"
EMPTY_TAGS = {"meta", "img", "br", "hr", "link", "input"}
PARTS = [
    "Verdict",
    "Conclusion",
    "Gate",
    "Accuracy",
    "Several completions per problem",
    "Problems that changed, in fp8",
]
PARTS += ["Other tasks", "Training", "Weights, layer by layer", "Checkpoints against the policy", "Serving"]
PARTS += ["Deployed endpoint", "lm-eval next to ours", "Run", "Commands"]


class Page(HTMLParser):
    """The tags, attributes and text of a page; a tag closed out of turn fails the test."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for found, attributes in self.tags if found == tag]


def estimate(base: float, grpo: float) -> dict:
    return {"base": base, "grpo": grpo, "difference": grpo - base, "interval": [0.1, 0.3], "n": 40}


def make_result(conclusion: str, formats: tuple[str, ...] = ("nf4", "bf16", "fp8", "awq")) -> dict:
    cell = {"accuracy": 0.5, "interval": [0.4, 0.6], "correct": 20, "strict": None, "parse_rate": 1.0, "n": 40}
    cell |= {"prompt_leak_rate": 0.0, "end_of_turn_rate": 0.9, "max_token_hits": 4, "undecided": 0}
    cell |= {"mean_tokens": 9.0, "seconds": 1.0}
    gain = {"difference": 0.2, "interval": [0.1, 0.3], "n": 40, "p": 0.0123, "holm_p": 0.0369, "mcnemar_p": None}
    gain |= {"discordant": [10, 2], "minimum_detectable_effect": 0.15, "verdict": "gain", "test": "sign-flip"}
    gain |= {
        "pass_at_k": {k: estimate(0.4, 0.6) for k in ("1", "2", "4")},
        "maj_at_k": {"k": 4, **estimate(0.5, 0.71)},
    }
    change = {"difference": -0.01, "interval": [-0.05, 0.03], "n": 40, "verdict": "survives"}
    others = [name for name in formats if name != "bf16"]
    return {
        "n": 40,
        "samples_per_problem": 4,
        "matrix": {policy: {name: dict(cell) for name in formats} for policy in ("base", "grpo")},
        "gain": {name: dict(gain) for name in formats},
        "gain_survival": {name: dict(change) for name in others},
        "quantization_loss": {name: dict(change) for name in others},
        "hygiene": {"refused": {"gain": {"awq": [f"grpo in awq has 88 % {HOSTILE}"]}, "gain_survival": {}}},
        "conclusion": conclusion,
        "max_new_tokens": 16,
        "temperature": 0.7,
        "seed": 3,
        "adapter_version": 10,
        "adapter_hash": "abc",
        "base_hash": "def",
        "versions": {"torch": "2.13.0"},
        "date": "2026-11-21",
        "command": ["python", "-m", "eval", "--run", HOSTILE],
    }


def make_diagnostics() -> dict:
    rows = []
    for block in range(3):
        for kind in ("self_attn.q_proj", "mlp.down_proj"):
            formats = {
                name: {"error": {"base": 0.09, "grpo": 0.091}, "snr": 0.1 * (block + 1), "retained": 0.3 * (block + 1)}
                for name in ("nf4", "nvfp4a16")
            }
            pair = {"base": 3.0, "grpo": 3.1}
            row = {"name": f"model.layers.{block}.{kind}", "shape": [64, 32], "relative_update": 0.01}
            rows.append({**row, "kurtosis": pair, "outlier_fraction": pair, "formats": formats})
    rows.append({"name": f"lm_head{HOSTILE}", "shape": [8, 8], "relative_update": None, "formats": {}})
    rows[0]["formats"]["nf4"] |= {"snr": None, "retained": None}
    summary = {"nf4": {"error": {"base": 0.09, "grpo": 0.0912}, "snr": 0.19, "retained": 0.456}}
    tokens = {"nf4": {"kl": 1e-3, "top1": 0.987}}
    return {"layers": rows, "summary": summary, "tokens": tokens, "verdict": [HOSTILE], "command": ["python", "merge"]}


def make_serving(name: str = f"mine {HOSTILE}") -> dict:
    row = {"requests": 8, "ttft_p50_s": 0.01, "ttft_p95_s": 0.02, "latency_p50_s": 1.0, "latency_p95_s": 1.234}
    batches = [{**row, "batch": batch, "tokens_per_s": 100.0 * batch, "itl_p50_s": None} for batch in (1, 4)]
    found = {"weights_gib": None, "kv_cache_gib": 1.0, "start_s": 20.0, "bytes": 2**30, "batches": batches}
    formats = {"bf16": found, "fp8": {**found, "weights_gib": 8.25, "notes": [HOSTILE]}, name: found}
    result = {"date": "2026-11-21", "machine": f"1 x H200 {HOSTILE}", "prompt_tokens": 256, "new_tokens": 128}
    return result | {"formats": formats, "failed": {"nvfp4": {"error": HOSTILE}}, "versions": {"vllm": "0.31.0"}}


def write_metrics(run: RunDir, steps: int = 12) -> None:
    rows = [
        {"step": n, "total_steps": steps, "reward": n / steps, "kl": math.sqrt(n) / 100} for n in range(1, steps + 1)
    ]
    run.metrics_file.write_text("".join(json.dumps({**row, "entropy": None}) + "\n" for row in rows))


def write_checkpoint(run: RunDir, policy: str, name: str, **fields: object) -> None:
    folder = run.merged / policy / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 2**20)
    verify = {"mean_kl": 0.0123, "top1_agreement": 0.951, "max_abs_dlogp": 0.5, "tokens": 783}
    write_manifest(folder, "checkpoint", policy=policy, format=name, retained_update=0.994, verify=verify, **fields)


def begin(folder: Path) -> RunDir:
    """A run with config.json alone."""
    found = RunDir(folder / "run")
    found.path.mkdir()
    config = {"run": {"name": f"tiny {HOSTILE}"}, "model": {"id": "m"}, "eval": {"gate": {"format": "fp8"}}}
    write_json(found.config_file, {"config": config, "versions": {"trl": "1.16.0"}, "command": ["grpo.py", HOSTILE]})
    return found


def gated(run: RunDir, result: dict, **limits: object) -> None:
    """Give a run an evaluation and a checkpoint that its gate can judge."""
    groups = {"run": {"name": "tiny"}, "model": {"id": "m"}, "data": {"path": "nowhere"}, "train": {"max_steps": 1}}
    write_json(run.config_file, {"config": {**groups, "eval": {"gate": {"format": "fp8", **limits}}}})
    write_json(run.eval_file, result)
    write_checkpoint(run, "grpo", "fp8")


@pytest.fixture
def run(tmp_path) -> RunDir:
    return begin(tmp_path)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> RunDir:
    """A run with every file that a report reads, reported; text that came from data is hostile. Not to be changed."""
    run = begin(tmp_path_factory.mktemp("full"))
    write_metrics(run)
    write_json(run.eval_file, make_result(f"No loss is shown in fp8: -1.0 points.\nCaution: {HOSTILE}"))
    write_json(run.path / "diagnostics.json", make_diagnostics())
    write_json(run.path / "serving.json", make_serving())
    (run.path / "eval-svamp").mkdir()
    write_json(run.path / "eval-svamp" / "eval.json", make_result(f"On svamp nothing. {HOSTILE}", ("bf16",)))
    compared = {"difference": -0.02, "interval": [-0.08, 0.04], "same": 0.875}
    endpoint = {"deployed": "grpo/fp8", "n": 40, "cell": {"accuracy": 0.555}, "compared": compared}
    write_json(run.path / "endpoint.json", {**endpoint, "out_of_limits": [HOSTILE]})
    score = {"task": "kit_gsm8k", "filter": "strict-match", "accuracy": 0.432, "interval": [0.3, 0.5], "n": 40}
    score |= {"num_fewshot": 5, "difference": {"difference": -0.07, "interval": [-0.1, 0.0]}}
    cell = {"policy": "grpo", "format": "fp8", "n": 40, "ours": {"accuracy": 0.5, "interval": [0.4, 0.6]}}
    cell |= {"harness": [score], "differences": {"kit_gsm8k": [HOSTILE]}, "command": ["python", "lm_eval"]}
    write_json(run.path / "lm_eval.json", {"cells": {"grpo/fp8": cell}})
    rule = {"name": "gain in fp8", "limit": "> 0.1, lower end", "measured": HOSTILE, "verdict": "pass"}
    write_checkpoint(run, "base", "fp8")
    write_checkpoint(run, "grpo", "fp8", promoted=True, promotion={"date": "2026-11-21", "rules": [rule]})
    (run.path / "eval").mkdir()
    for policy, correct in (("base", False), ("grpo", True)):
        row = {"completion": f"{policy} says {HOSTILE}", "gold": "8", "correct": correct}
        row |= {
            "tokens": 9,
            "ended": True,
            "hit_max_tokens": False,
            "parsed": True,
            "answer": "8",
            "prompt_leak": False,
        }
        row |= {"correct_strict": None}
        rows = [{"problem_id": f"p{n}", "sample": k, **row} for n in range(5) for k in range(2)]
        (run.path / "eval" / f"{policy}-fp8.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report_page.main(["--run", str(run.path)]) == 0
    return run


def page(run: RunDir) -> Page:
    if not (run.path / "report.html").exists():
        assert report_page.main(["--run", str(run.path)]) == 0
    return Page((run.path / "report.html").read_text())


def test_a_run_with_nothing_but_metrics_renders_and_names_every_command_that_is_missing(run, capsys):
    assert report_page.main(["--run", str(run.path)]) == 0
    assert "No step was logged" in page(run).text
    (run.path / "report.html").unlink()
    write_metrics(run)
    capsys.readouterr()
    found = page(run)
    assert sorted(file.name for file in run.path.iterdir()) == [
        "config.json", "metrics.jsonl", "report-pictures", "report.html", "report.md",
    ]  # fmt: skip
    assert len(found.all("img")) == 1
    for command in ("eval --run", "eval gate --run", "merge diagnose --run", "merge --run", "eval.serving --run"):
        assert f"python -m {command} {run.path}" in found.text
    assert capsys.readouterr().out.count("Make it with: ") == 5


def test_every_part_is_there_and_the_conclusion_is_word_for_word(full):
    found = page(full)
    titles = re.findall(r"<h2>(.*?)</h2>", (full.path / "report.html").read_text())
    assert titles == PARTS
    values = [
        "0.0123",
        "0.0369",
        "1 x H200",
        "8.25",
        "1.23e-02",
        "95.1",
        "99.4",
        "45.6",
        "9.12",
        "71.0",
        "98.7",
        "87.5",
    ]
    values += ["43.2", "-7.0", "svamp: On svamp nothing.", "No loss is shown in fp8: -1.0 points."]
    assert [value for value in values if value not in found.text] == []
    assert "0.7, seed 3" in found.text and "4 completions of each" in found.text
    markdown = (full.path / "report.md").read_text()
    assert re.findall(r"^## (.*)", markdown, re.MULTILINE) == PARTS
    assert "- No loss is shown in fp8: -1.0 points." in markdown
    assert "promoted, 2026-11-21, by another evaluation than the one shown here" in found.text
    html = (full.path / "report.html").read_text()
    assert html.count("<table>") == html.count('<div class="scroll" tabindex="0"><table>') > 10
    text = (full.path / "eval.md").read_text()
    assert "| fp8 | pass@4 | 40.0 | 60.0 | +20.0 | 10.0 to 30.0 |" in text
    assert "| fp8 | +20.0 | 10.0 to 30.0 | 0.0123 | 0.0369 | 10 | 2 | 15.0 | 40 |" in text


def test_the_verdict_comes_first_in_one_line(run, full):
    def line(of: RunDir) -> str:
        assert report_page.main(["--run", str(of.path)]) == 0
        first, second = re.findall(r"^## .*$", markdown := (of.path / "report.md").read_text(), re.MULTILINE)[:2]
        assert first == "## Verdict"
        (said,) = markdown[markdown.index(first) + len(first) : markdown.index(second)].split("\n\n")[1:-1]
        return said.replace("\\", "")

    kept = "Gain +20.0 [10.0 to 30.0] points on 40 problems, -1.0 [-5.0 to 3.0] against the gain in bf16."
    assert line(full) == f"Promoted: GRPO in fp8. {kept}"
    assert line(run) == "Not promoted: nothing was evaluated."
    gated(run, make_result("Nothing.", ("bf16", "fp8")), max_quantization_loss=0.04)
    missed = "Not promoted: GRPO in fp8 misses 3 of 9 rules of the gate: gain lost against bf16 (NOT SHOWN), "
    assert line(run) == f"{missed}truncated at the token limit (FAIL), answers undecided (FAIL). {kept}"


def test_checkpoints_that_were_merged_again_are_told_from_those_that_were_measured(run, capsys):
    result = make_result("Nothing.", ("bf16", "fp8"))
    gated(run, result)
    measured = artifact_hash(read_json(run.merged / "grpo/fp8/manifest.json"))
    for digest, remade in ((measured, False), ("of the one before", True)):
        result["matrix"]["grpo"]["fp8"]["artifact_hash"] = digest
        write_json(run.eval_file, result)
        assert report_page.main(["--run", str(run.path)]) == 0
        told, found = "measured on other checkpoints than those in the run: grpo/fp8 came later.", page(run).text
        assert (told in found) == (told in capsys.readouterr().out) == remade
        # Before a gate the rules are shown, but none of one checkpoint on a figure of another.
        assert ("The rules for this evaluation" in found) == ("KL(policy || artifact)" in found) != remade


def test_text_from_data_runs_nothing_and_loads_nothing(full):
    found = page(full)
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"script", "iframe", "object", "embed", "link", "base", "form", "svg"}
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert not any(name in ("style", "srcset", "action") for name in attributes)
        for name in ("src", "href"):
            if name in attributes:
                assert re.match(r"data:image/svg\+xml;base64,|#", attributes[name]), attributes[name]
    assert "url(" not in (full.path / "report.html").read_text()
    # Completion, run name, gate's rule, machine, note, error, diagnostics' verdict and layer, command are shown.
    assert found.text.count("<script>alert('x')</script>") >= 12
    assert "\x00" not in found.text and "\x1b" not in found.text


def test_hostile_text_breaks_no_table_and_starts_no_picture_in_markdown(full):
    page(full)
    text = (full.path / "report.md").read_text()
    outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "<script" not in outside and "<img" not in outside
    assert set(re.findall(r"(?<!\\)!\[[^\]]*\]\(([^)]*)\)", outside)) == {
        f"{report_page.PICTURES}/{file.name}" for file in (full.path / report_page.PICTURES).iterdir()
    }
    widths = None
    for line in outside.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert None in (cells, widths) or cells == widths, line
        widths = cells


def test_pictures_are_whole_svg_with_a_description_and_the_same_for_the_same_data(full):
    images = page(full).all("img")
    assert len(images) == len(list((full.path / report_page.PICTURES).iterdir())) == 9
    for image in images:
        root = ElementTree.fromstring(base64.b64decode(image["src"].partition(",")[2]))
        assert root.tag.endswith("svg") and len(image["alt"]) > 20
    before = {file.name: file.read_bytes() for file in (full.path / report_page.PICTURES).iterdir()}
    assert report_page.main(["--run", str(full.path)]) == 0
    assert {file.name: file.read_bytes() for file in (full.path / report_page.PICTURES).iterdir()} == before


def test_evaluations_of_another_folder_are_drawn_there(full, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_json(other / "eval.json", make_result("Nothing is shown.", ("bf16", "fp8")))
    assert report_page.main(["--run", str(full.path), "--out", str(other)]) == 0
    assert "Nothing is shown." in (other / "report.html").read_text()
    assert (other / "eval.md").is_file() and "Nothing is shown." not in (full.path / "report.html").read_text()
    write_json(other / "eval.json", {"matrix": {}})
    for arguments, said in (
        (["--run", str(full.path), "--out", str(tmp_path / "nowhere")], "does not exist"),
        (["--run", str(full.path), "--out", str(other)], "is not the result of an evaluation"),
        (["--run", str(tmp_path / "x")], "no run directory"),
    ):
        with pytest.raises(BadInput, match=said):
            report_page.main(arguments)


def test_a_distilled_policy_is_never_called_grpo(full, tmp_path):
    copied = RunDir(shutil.copytree(full.path, tmp_path / "distilled"))
    config = read_json(copied.config_file)
    config["config"]["distill"] = {"teacher_adapter": "runs/first/adapters/v000010"}
    write_json(copied.config_file, config)
    assert report_page.main(["--run", str(copied.path)]) == 0
    for name in ("report.html", "report.md", "eval.md"):
        text, before = ((run.path / name).read_text() for run in (copied, full))
        assert "GRPO" not in text and "GRPO" in before, name
        assert "distilled" in text and "distilled" not in before, name
    assert "Distillation tiny" in (copied.path / "report.html").read_text()


def test_a_format_has_one_look_everywhere_and_no_two_share_it():
    looks = [*map(plots.look, FORMATS), *plots.OTHERS]
    assert len({color for color, _ in looks}) == len({marker for _, marker in looks}) == len(looks)
    assert plots.order(["x", "awq", "bf16", "nf4"]) == ["nf4", "bf16", "awq", "x"]
    assert plots.look("x", ["fp8", "y", "x"]) == plots.OTHERS[1]


def test_blocks_are_written_in_both_forms():
    blocks = [Text("1. a # b"), Bullets(["- x"]), Table(["n", "w"], [[1, "a|b"]], "c"), Commands(["a ``` b"])]
    document = Document("T", "S", [Section("One & two", [*blocks, Missing("None.", "make it")])])
    found = Page(to_html(document))
    assert "1. a # b" in found.text and "a|b" in found.text and "make it" in found.text
    assert found.all("a")[0]["href"] == "#" + found.all("section")[0]["id"]
    assert [attributes["class"] for attributes in found.all("td")] == ["number", "short"]
    markdown = to_markdown(document, "p")
    assert "1\\. a # b" in markdown and "- - x" not in markdown
    assert "| 1 | a\\|b |" in markdown and "````\na ``` b\n````" in markdown
