"""Several runs beside each other, and the pages and pictures of one run and of several."""

import base64
import html.parser
import io
import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.cells import cell_len
from rich.console import Console

from eval import plots
from kit.core.metrics_log import MetricsLog, series
from kit.core.run_directory import RunDir
from launch.watching.compare import common_step, compared, frame_of_runs
from launch.watching.plot import RANGES, panels, reward_range
from reward import REWARDS
from tests.unit.metric_rows import log_of, make_run, recorded, rows_of, step_row
from tests.unit.test_watch import watch

__all__ = ["watch"]  # a fixture


@pytest.fixture
def runs(tmp_path) -> list[RunDir]:
    """A slow good run, a fast poor one that is ahead, and one that has not begun."""
    good = [step_row(step, reward=0.5 + 0.01 * step, heldout_accuracy=0.6) for step in range(1, 21)]
    poor = [step_row(step, reward=0.1 + 0.019 * step, kl=2.0) for step in range(1, 41)]
    paths = [make_run(tmp_path / name, rows) for name, rows in (("poor", poor), ("new", None), ("good", good))]
    return [RunDir(path) for path in paths]


def logs_of(runs: list[RunDir]) -> list[MetricsLog]:
    return [log_of(run.path) for run in runs]


def rendered(runs: list[RunDir], width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(frame_of_runs(runs, logs_of(runs), width, height))
    return console.file.getvalue().splitlines()


def test_runs_are_compared_at_the_last_step_that_all_have_reached_best_first(runs):
    logs = logs_of(runs)
    assert common_step(logs) == 20
    found = compared(runs, logs)
    assert [run.name for run in found] == ["good", "poor", "new"]
    assert [run.at["reward"] for run in found[:2]] == pytest.approx([0.655, 0.3945])
    assert found[1].at["reward_now"] == pytest.approx(0.7745), "the poor one is ahead and looks better now"
    assert [alert.name for alert in found[1].alerts] == ["KL climbing"]
    assert found[2].at["reward"] is None and found[2].state["state"] == "waiting"


def test_curves_have_the_same_step_at_the_same_place(runs):
    lines = rendered(runs, 120)
    curves = {line.split()[0]: line for line in lines if re.search("[▁▂▃▄▅▆▇█]", line)}
    start = curves["good"].index(re.search("[▁▂▃▄▅▆▇█]", curves["good"])[0])
    assert start == curves["poor"].index(re.search("[▁▂▃▄▅▆▇█]", curves["poor"])[0])
    first = re.split("   +", curves["good"][start:])[0]
    whole = re.split("  +", curves["poor"][start:])[0]
    assert len(first.rstrip()) == pytest.approx(len(whole.rstrip()) / 2, abs=1), "20 of 40 steps: half as long"


@pytest.mark.parametrize("width", [40, 60, 80, 140])
@pytest.mark.parametrize("height", [None, 10, 24])
def test_the_comparison_fits_the_terminal(runs, width, height):
    lines = rendered(runs, width, height)
    assert max(map(cell_len, lines)) <= width
    assert height is None or len(lines) <= height
    assert any("good" in line for line in lines)
    if width == 140:
        assert all(word in "\n".join(lines) for word in ("held-out", "KL climbing", "reward @20", "s/step", "60.0%"))


def test_what_is_no_run_is_left_out_of_several_and_refused_alone(runs, tmp_path, watch):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "study").mkdir()
    done = watch(*sorted(tmp_path.iterdir()), "--once")
    assert done.code == 0 and "3 runs, best reward first" in done.out
    assert done.err == f"not a run, skipped: {tmp_path / 'notes.txt'}, {tmp_path / 'study'}\n"
    done = watch(tmp_path / "study", tmp_path / "notes.txt", "--once")
    assert done.code == 2 and re.search("none of .*study.* is a run directory", done.err)


def test_json_of_several_has_every_run_and_the_common_step(runs, watch):
    done = watch(*(run.path for run in runs), "--once", "--json")
    value = json.loads(done.out)
    assert done.code == 0 and value["common_step"] == 20
    assert [(Path(run["run"]).name, run["state"]) for run in value["runs"]] == [
        ("poor", "finished"),
        ("new", "waiting"),
        ("good", "running"),
    ]


def test_several_runs_cannot_be_followed_through_a_pipe(runs, watch):
    done = watch(*(run.path for run in runs))
    assert done.code == 2 and re.search("in a terminal only.*--once", done.err)


class Page(html.parser.HTMLParser):
    """The tags, the addresses and the text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for key, value in attributes if key in ("src", "href", "onerror", "onload")]

    def handle_data(self, data):
        self.text += data


def test_the_html_page_is_one_file_that_loads_and_runs_nothing(tmp_path, watch):
    run = make_run(tmp_path / "<b>run", recorded("server"))
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    (run / "completions").mkdir()
    row = {"problem_id": "1", "prompt": evil, "completion": evil, "rewards": {evil: 1.0}, "advantage": 0.5}
    (run / "completions" / "step-000080.jsonl").write_text(json.dumps(row) + "\n")
    done = watch(run, "--html")
    assert (done.code, done.out.strip()) == (0, str(run / "health.html"))
    text = (run / "health.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and page.tags.count("img") == 8
    assert page.links and all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "url(" not in text and "@import" not in text
    assert "alert(1)" in page.text and "No rule fires." in page.text and "step 80 of 80" in page.text
    pictures = [base64.b64decode(link.partition(",")[2]).decode() for link in page.links]
    assert "sampler against trainer" in "".join(pictures)
    assert not [file.name for file in run.iterdir() if file.name.startswith(".")]


def test_the_html_page_of_a_distillation_names_what_fires_with_meaning_and_remedy(tmp_path, watch):
    run = make_run(tmp_path / "run", rows_of(30, kl=3.0, loss=None, divergence=0.1))
    watch(run, "--html")
    text = (run / "health.html").read_text()
    assert "<h1>Distillation run</h1>" in text and "GRPO" not in text
    assert 'class="alert fault"><b>loss not finite</b>' in text and "policy.init_adapter" in text
    assert "<b>KL climbing</b>: 3 nats &gt; 1 nats." in text


def test_pictures_and_page_of_several_runs_go_where_they_are_asked_for(runs, tmp_path, watch):
    folder = tmp_path / "out"
    paths = [run.path for run in runs]
    done = watch(*paths, "--plot", "--out", folder)
    assert done.code == 2 and "out is not a directory" in done.err
    folder.mkdir()
    done = watch(*paths, "--plot", "--html", "--out", folder)
    assert done.code == 0 and done.out.split() == [str(folder / "comparison.png"), str(folder / "comparison.html")]
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    page = Page((folder / "comparison.html").read_text())
    assert page.text.index("good") < page.text.index("poor") < page.text.index("new")
    assert "KL climbing" in page.text and page.tags.count("img") == 6


def test_the_same_steps_give_the_same_page(tmp_path, watch):
    texts = []
    for name in ("a", "b"):
        run = make_run(tmp_path / name / "run", recorded("in_process"))
        watch(run, "--html")
        texts.append(re.sub(r"last line [^<]*", "", (run / "health.html").read_text()))
    assert texts[0] == texts[1]


def drawn(panel, rows: list[dict]) -> tuple[dict[str, list[float]], list[float]]:
    """{label: values} of a panel's curves with a legend, and the heights of its band."""
    axes = Figure().subplots()
    panel(axes, [row["step"] for row in rows], rows)
    shown = {text.get_text() for text in axes.get_legend().get_texts()}
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines() if line.get_label() in shown}
    heights = [y for band in axes.collections for path in band.get_paths() for _, y in path.vertices]
    return lines, heights


def test_a_curve_is_smoothed_alike_in_health_png_and_in_the_report_and_both_say_how(tmp_path):
    rows = [step_row(step, kl=5.0 if step == 15 else 0.001 * step) for step in range(1, 31)]
    run = RunDir(make_run(tmp_path / "run", rows))
    steps, found = [row["step"] for row in rows], panels(rows, run)
    keys = {"kl": "median of 10 steps", "entropy": "mean of 10 steps", "reward": "mean of 10 steps"}
    values = {key: (key, "unit", series(rows, key)) for key in keys}
    report = plots.training(steps, values)
    for key, axes in zip(keys, report.axes, strict=False):
        ours, _ = drawn(found[key], rows)
        theirs = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        assert set(theirs) == {"each step", keys[key]} == {text.get_text() for text in axes.get_legend().get_texts()}
        assert {label: ours[label] for label in theirs} == theirs
    assert max(drawn(found["kl"], rows)[0]["median of 10 steps"]) < 0.1, "one step is not the curve"


@pytest.mark.parametrize(
    ("functions", "weights", "span"),
    [
        (["math"], None, (0.0, 1.0)),
        (["math", "boxed_format"], [1.0, 0.5], (0.0, 1.5)),
        (["math", "length"], [1.0, 0.2], (-0.2, 1.0)),
        (["math", "repetition"], [1.0, -0.2], (0.0, 1.2)),
        (["mine:reward"], None, (-math.inf, math.inf)),
        ("math", [1.0, 2.0], (-math.inf, math.inf)),
        (None, None, (-math.inf, math.inf)),
    ],
)
def test_the_reward_band_stays_where_rewards_can_be(tmp_path, functions, weights, span):
    rows = [step_row(step, reward=0.9 if step % 2 else 0.05, reward_std=0.4) for step in range(1, 9)]
    run = RunDir(make_run(tmp_path / "run", rows))
    run.config_file.write_text(json.dumps({"config": {"reward": {"functions": functions, "weights": weights}}}))
    assert reward_range(run) == pytest.approx(span)
    lines, heights = drawn(panels(rows, run)["reward"], rows)
    assert set(lines) == {"each step", "mean of 10 steps"}
    assert min(heights) == pytest.approx(max(span[0], -0.35)) and max(heights) == pytest.approx(min(span[1], 1.3))


def test_the_range_of_every_function_of_the_kit_is_known():
    assert set(RANGES) == set(REWARDS) - {"reward_model"}, "a reward model has no range"
