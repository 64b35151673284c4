"""The gate on artifacts of a few bytes and results written by hand: exit codes, verdicts, the promoted flag."""

import dataclasses
import itertools
import json
import shutil

import pytest

from eval import gate
from eval import rules as gate_rules
from eval.artifacts import artifact_hash, find_sources
from eval.problems import held_out, problems_hash
from eval.result import measurement
from kit.core.config.load import config_from_dict
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import MANIFEST, RunDir, file_hash, publish, read_manifest, write_json, write_manifest
from kit.core.run_files import read_json
from kit.data.problems import load_problems

CELL = {"n": 300, "undecided": 0, "parse_rate": 1.0, "prompt_leak_rate": 0.0, "end_of_turn_rate": 1.0}
CELL |= {"max_token_hit_rate": 0.0, "undecided_rate": 0.0, "accuracy": 0.5, "interval": [0.4, 0.6], "strict": None}
BASE = {"hash": "b" * 64, "quantization": {"type": "nf4", "storage_dtype": "float32"}, "quantized": [], "tensors": {}}
COMPARED = {"max_abs_dlogp": 0.1, "top1_agreement": 0.99, "tokens": 100}
TESTED = {"discordant": [9, 1], "minimum_detectable_effect": 0.1}
FORM = {"share": 0.3, "gain_there": 0.05, "elsewhere": {"difference": 0.14, "interval": [0.09, 0.19]}}


def estimate(difference: float, low: float, high: float) -> dict:
    return {"difference": difference, "interval": [low, high], "n": 300} | TESTED


def make_run(tmp_path, name: str = "fp8") -> RunDir:
    """A run whose checkpoint in a format passes every rule of the default gate."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    for split, verb in (("train", "trained"), ("test", "asked")):
        rows = [json.dumps({"question": f"What is {verb} in round {i}?", "answer": str(i)}) for i in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    config = {
        "run": {"name": "tiny"},
        "eval": {"gate": {"format": name}},
        "model": {"id": "tiny"},
        "train": {"max_steps": 1},
        "data": {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "test.jsonl")},
    }
    write_json(run.config_file, {"config": config})
    write_json(run.base_file, BASE)
    matrix = {"base": {}, "grpo": {}}
    for policy, used in itertools.product(("base", "grpo"), dict.fromkeys(("bf16", name))):
        with publish(run.merged / policy / used) as partial:
            (partial / "model.safetensors").write_bytes(f"weights of {policy} {used}".encode())
            manifest = write_manifest(
                partial,
                "checkpoint",
                policy=policy,
                format=used,
                base_hash="b" * 64,
                adapter_version=10 if policy == "grpo" else None,
                adapter_hash="a" * 64 if policy == "grpo" else None,
                verify={"mean_kl": 0.001} | COMPARED,
                promoted=False,
            )
        matrix[policy][used] = {**CELL, "artifact_hash": artifact_hash(manifest)}
    settings = config_from_dict(config)
    result = {
        "n": 300,
        "problems_hash": problems_hash(held_out(settings.data, settings.eval.max_problems)),
        "matrix": matrix,
        "gain": {"bf16": estimate(0.2, 0.15, 0.25), name: {**estimate(0.19, 0.14, 0.24), "base_form": FORM}},
        "gain_survival": {name: estimate(-0.01, -0.03, 0.01)},
        "quantization_loss": {name: estimate(0.01, -0.01, 0.03)},
        "conclusion": "",
        "base_hash": "b" * 64,
        "adapter_hash": "a" * 64,
        "data": dataclasses.asdict(settings.data),
        "eval": measurement(settings),
    }
    write_json(run.eval_file, result)
    return run


@pytest.fixture(autouse=True)
def figures_as_written(monkeypatch):
    """These results are written by hand, without completions; test_eval_gate_attacks.py derives them from such."""
    monkeypatch.setattr(gate, "rechecked", lambda folder, config, result, problems, hashes: result)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def edit(run: RunDir, *path: str, value: object) -> None:
    result = read_json(run.eval_file)
    *parents, leaf = path
    target = result
    for parent in parents:
        target = target[parent]
    target[leaf] = value
    write_json(run.eval_file, result)


def decide(run: RunDir, *overrides: str) -> int:
    return gate.main(["--run", str(run.path), *overrides])


def promoted(run: RunDir, name: str = "fp8") -> bool:
    return read_manifest(run.merged / "grpo" / name, "checkpoint", deep=True)["promoted"]


def test_a_run_that_passes_every_rule_is_promoted_with_the_evidence(run, capsys):
    assert not promoted(run)
    assert decide(run) == 0
    assert promoted(run)
    promotion = read_json(run.merged / "grpo" / "fp8" / MANIFEST)["promotion"]
    assert promotion["eval_hash"] == file_hash(run.eval_file)
    assert len(promotion["rules"]) == 9 and {rule["verdict"] for rule in promotion["rules"]} == {"pass"}
    assert capsys.readouterr().out.count("  pass\n") == 9


@pytest.mark.parametrize(
    ("path", "value", "rule", "verdict"),
    [
        (("gain", "fp8"), estimate(0.03, -0.01, 0.07), "gain in fp8", "NOT SHOWN"),
        (
            ("gain", "fp8"),
            estimate(0.03, -0.03, 0.09),
            "gain in fp8",
            "about 1200 problems instead of 300 would decide",
        ),
        (("gain", "fp8"), estimate(0.03, 0.0, 0.06), "gain in fp8", "NOT SHOWN"),
        (("gain", "fp8"), estimate(-0.02, -0.05, 0.01), "gain in fp8", "FAIL"),
        (("quantization_loss", "fp8"), estimate(0.03, 0.0, 0.06), "accuracy lost", "NOT SHOWN"),
        (("quantization_loss", "fp8"), estimate(0.07, 0.04, 0.1), "accuracy lost", "FAIL"),
        (("gain_survival", "fp8"), estimate(-0.03, -0.06, 0.0), "gain lost", "NOT SHOWN"),
        (("gain_survival", "fp8"), estimate(-0.08, -0.12, -0.04), "gain lost", "FAIL"),
        (("matrix", "grpo", "fp8", "parse_rate"), 0.89, "parse rate", "FAIL"),
        (("matrix", "grpo", "fp8", "prompt_leak_rate"), 0.02, "prompt leak", "FAIL"),
        (("matrix", "grpo", "fp8", "end_of_turn_rate"), 0.5, "ended by", "FAIL"),
        (("matrix", "grpo", "fp8", "max_token_hit_rate"), 0.11, "truncated at the token limit", "FAIL"),
        (("matrix", "grpo", "fp8", "undecided_rate"), 0.03, "answers undecided", "FAIL"),
        (("matrix", "grpo", "fp8", "max_token_hit_rate"), None, "truncated at the token limit", "FAIL"),
        # What fp8 is measured against has to be sound, too.
        (("matrix", "grpo", "bf16", "max_token_hit_rate"), 0.5, "truncated at the token limit", "FAIL"),
        (("matrix", "grpo", "bf16", "parse_rate"), 0.5, "parse rate", "0.5 (grpo in bf16)"),
        (("matrix", "base", "fp8", "undecided_rate"), 0.03, "answers undecided", "FAIL"),
        (("matrix", "base", "bf16", "undecided_rate"), 0.03, "answers undecided", "FAIL"),
    ],
)
def test_each_rule_alone_keeps_a_checkpoint_from_promotion(run, capsys, path, value, rule, verdict):
    edit(run, *path, value=value)
    assert decide(run) == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if line.endswith(("FAIL", "NOT SHOWN"))]
    assert len(missed) == 1 and missed[0].startswith(rule) and verdict in missed[0]
    assert not promoted(run)


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "w4a16", "awq", "nvfp4a16", "nvfp4"])
def test_every_format_with_a_checkpoint_of_its_own_can_be_promoted(tmp_path, name):
    run = make_run(tmp_path, name)
    assert decide(run) == 0 and promoted(run, name)
    assert name == "bf16" or not promoted(run, "bf16")


def test_what_is_not_a_number_passes_no_rule(run):
    config, result, nan = gate.run_config(run, []), read_json(run.eval_file), float("nan")
    for part in ("gain", "gain_survival", "quantization_loss"):
        result[part]["fp8"] |= estimate(nan, nan, nan)
    for row in result["matrix"].values():
        for cell in row.values():
            cell |= {key: nan for key in cell if key.endswith("_rate")}
    rules = gate_rules.judge(config, result, {"verify": {"mean_kl": nan}})
    assert len(rules) == 9 and "pass" not in {rule.verdict for rule in rules}


def test_a_figure_at_its_limit_is_within_it(run):
    config, result = gate.run_config(run, []), read_json(run.eval_file)
    limits = config.eval.gate
    for part, sign in (("gain_survival", -1), ("quantization_loss", 1)):
        low, high = sorted((0.0, sign * limits.max_quantization_loss))
        result[part]["fp8"] |= estimate(sign * 0.01, low, high)
    result["matrix"]["grpo"]["fp8"] |= {
        "parse_rate": limits.min_parse_rate,
        "prompt_leak_rate": limits.max_prompt_leak,
        "end_of_turn_rate": limits.min_end_of_turn_rate,
        "max_token_hit_rate": limits.max_token_hit_rate,
        "undecided_rate": config.reward.max_unknown_fraction,
    }
    rules = gate_rules.judge(config, result, {"verify": {"mean_kl": limits.max_policy_kl}})
    assert {rule.verdict for rule in rules} == {"pass"}


def test_a_base_out_of_range_is_noted_and_keeps_nothing_from_promotion(run, capsys):
    edit(run, "matrix", "base", "fp8", value={**read_json(run.eval_file)["matrix"]["base"]["fp8"], "parse_rate": 0.7})
    assert decide(run) == 0
    note = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("note: the fp8 base"))
    assert "70.0 % completions with a readable answer (at least 90 %)" in note
    assert "no readable answer or did not stop contribute +5.0 points" in note
    assert "the others +14.0 (95 % interval 9.0 to 19.0)" in note


def test_too_few_problems_are_refused_when_a_number_is_asked_for(run, capsys):
    assert decide(run, "--eval.gate.min_problems", "300") == 0
    assert decide(run, "--eval.gate.min_problems", "301") == 1
    assert ">= 301" in capsys.readouterr().out and not promoted(run)
    assert read_json(run.merged / "grpo" / "fp8" / MANIFEST)["promotion"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_quantization_loss", "5"),
        ("min_parse_rate", "90"),
        ("max_token_hit_rate", "-0.1"),
        ("max_prompt_leak", ".nan"),
        ("min_gain", "2"),
        ("max_policy_kl", "-1"),
        ("max_policy_kl", ".nan"),
        ("min_problems", "0"),
    ],
)
def test_a_limit_that_is_no_fraction_is_bad_input(run, key, value):
    with pytest.raises(BadInput, match=rf"eval\.gate\.{key} (\(|is nan)"):
        decide(run, f"--eval.gate.{key}={value}")


@pytest.mark.parametrize(("verify", "said"), [(None, "not measured"), ({"mean_kl": 0.06} | COMPARED, "0.06")])
def test_an_artifact_far_from_the_policy_or_never_compared_with_it_is_not_promoted(run, capsys, verify, said):
    manifest = run.merged / "grpo" / "fp8" / MANIFEST
    write_json(manifest, {**read_json(manifest), "verify": verify})
    assert decide(run) == 1
    assert f"{said}" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("KL("))


def test_a_dry_run_judges_and_changes_nothing(run):
    manifest = run.merged / "grpo" / "fp8" / MANIFEST
    before = manifest.read_bytes()
    assert decide(run, "--dry_run") == 0 and manifest.read_bytes() == before
    assert decide(run) == 0 and promoted(run)
    assert decide(run, "--dry_run", "--eval.gate.max_policy_kl", "0.0001") == 1 and promoted(run)


def _tamper(run):
    (run.merged / "grpo" / "fp8" / "model.safetensors").write_bytes(b"WEIGHTS of grpo fp8")


def _add_an_adapter(run):
    """transformers would put it on the checkpoint's weights."""
    (run.merged / "grpo" / "fp8" / "adapter_config.json").write_text("{}")


def _merge_again(run, policy="grpo", name="fp8"):
    place = run.merged / policy / name
    (place / "model.safetensors").write_bytes(b"heavier")
    old = read_json(place / MANIFEST)
    facts = {key: value for key, value in old.items() if key not in ("kind", "created", "files")}
    write_manifest(place, "checkpoint", **facts)


def _without_bf16(run):
    for policy in ("base", "grpo"):
        edit(run, "matrix", policy, value={"fp8": read_json(run.eval_file)["matrix"][policy]["fp8"]})


def _other_problem(run):
    file = run.path.parent / "test.jsonl"
    file.write_text(file.read_text().replace("round 2", "round 22"))


@pytest.mark.parametrize(
    ("spoil", "overrides", "message"),
    [
        (lambda run: edit(run, "adapter_hash", value="c" * 64), [], "stale: its adapter_hash is cccc"),
        (lambda run: edit(run, "base_hash", value="c" * 64), [], "stale: its base_hash"),
        (_merge_again, [], "artifact_hash of grpo in fp8"),
        (lambda run: _merge_again(run, "grpo", "bf16"), [], "artifact_hash of grpo in bf16"),
        (lambda run: _merge_again(run, "base", "fp8"), [], "artifact_hash of base in fp8"),
        (lambda run: _merge_again(run, "base", "bf16"), [], "artifact_hash of base in bf16"),
        (_other_problem, [], "stale: its problems_hash"),
        (_without_bf16, [], r"no base in bf16, grpo in bf16: .* fp8 with bf16\. .*--formats fp8 bf16"),
        (
            lambda run: shutil.rmtree(run.merged / "base" / "bf16"),
            [],
            r"base/bf16 no longer exists.*--format bf16",
        ),
        (
            lambda run: edit(run, "eval", "seed", value=7),
            [],
            r"eval.seed was 7, it is 0\. Evaluate again: .*, or gate what was measured with --eval.seed 7$",
        ),
        (lambda run: edit(run, "eval", "temperature", value=1.0), [], "eval.temperature was 1.0"),
        (lambda run: edit(run, "eval", "max_new_tokens", value=9), [], "eval.max_new_tokens was 9, it is 256"),
        (lambda run: edit(run, "eval", "bootstrap_samples", value=100), [], "eval.bootstrap_samples was 100"),
        (lambda run: edit(run, "eval", value=None), [], "measured with other settings"),
        (
            lambda run: edit(run, "reward_options", value={"math": {"tolerance": 0.5}}),
            [],
            r"reward\.options was \{'math': \{'tolerance': 0\.5\}\}, it is \{\}\. .* --reward\.options '\{\"math\"",
        ),
        (
            lambda run: None,
            ["--rollout.stop", '["</answer>"]'],
            r"rollout\.stop was \[\], it is \['</answer>'\]\. Evaluate again: .* with --rollout.stop '\[\]'$",
        ),
        (lambda run: edit(run, "eval", "stop", value=["END"]), [], r"rollout\.stop was \['END'\], it is \[\]\."),
        (lambda run: None, ["--eval.max_problems", "3"], "eval.max_problems was 300, it is 3"),
        (lambda run: None, ["--rollout.max_completion_length", "99"], "eval.max_new_tokens was 256, it is 99"),
        (_tamper, [], "is damaged"),
        (_add_an_adapter, [], "holds adapter_config.json, which its manifest does not list"),
        (lambda run: edit(run, "data", "eval_path", value="easy.jsonl"), [], "data.eval_path was 'easy.jsonl'"),
        (lambda run: edit(run, "data", value=None), [], "other problems or prompts"),
        (lambda run: run.eval_file.unlink(), [], "python -m eval --run"),
        (lambda run: run.eval_file.write_text("{"), [], "is not JSON"),
        (lambda run: run.eval_file.write_text(json.dumps({"n": 3})), [], "is not the result of an evaluation"),
        (lambda run: None, ["--eval.gate.format", "w4a16"], "--format w4a16"),
        (lambda run: None, ["--eval.gate.format", "nf4"], "no merged checkpoint to promote"),
        (lambda run: None, ["--eval.gate.min_gian", "0"], "min_gain"),
    ],
)
def test_what_the_gate_cannot_judge_is_bad_input(run, spoil, overrides, message):
    spoil(run)
    with pytest.raises(BadInput, match=message):
        decide(run, *overrides)


def test_another_batch_size_or_choice_of_columns_measures_the_same(run):
    edit(run, "eval", "batch_size", value=7)
    edit(run, "eval", "formats", value=["bf16", "fp8"])
    assert decide(run) == 0


def test_an_evaluation_before_there_were_stop_texts_is_judged_as_one_without(run):
    result = read_json(run.eval_file)
    del result["eval"]["stop"]
    write_json(run.eval_file, result)
    assert decide(run) == 0
    with pytest.raises(BadInput, match=r"rollout\.stop was \[\], it is \['END'\]"):
        decide(run, "--rollout.stop", "[END]")


def test_an_evaluation_before_the_template_had_arguments_is_judged_as_one_without(run):
    result = read_json(run.eval_file)
    del result["data"]["chat_template_kwargs"]
    write_json(run.eval_file, result)
    assert decide(run) == 0
    with pytest.raises(BadInput, match=r"data\.chat_template_kwargs was \{\}, it is \{'enable_thinking': False\}"):
        decide(run, "--data.chat_template_kwargs={enable_thinking: false}")


def leak(run: RunDir, question: str, split: str = "test") -> None:
    with open(run.path.parent / f"{split}.jsonl", "a") as file:
        file.write(json.dumps({"question": question, "answer": "1"}) + "\n")


def test_a_training_problem_put_among_the_held_out_ones_afterwards_stops_the_gate(run):
    assert decide(run) == 0 and promoted(run)
    leak(run, "what is TRAINED in  round 1")
    with pytest.raises(CheckFailed, match="1 of 5 held-out problems are training problems"):
        decide(run, "--dry_run")
    assert promoted(run)
    with pytest.raises(CheckFailed, match="1 of 5 held-out problems are training problems"):
        decide(run)
    assert not promoted(run)


def test_a_held_out_problem_added_to_the_training_file_stops_the_gate_whatever_data_it_is_given(run, tmp_path):
    leak(run, "What is asked in round 3?", "train")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"question": "Another?", "answer": "1"}) + "\n")
    for overrides in ([], ["--data.path", str(other)]):
        with pytest.raises(CheckFailed, match="1 of 4 held-out problems are training problems"):
            decide(run, *overrides)


def test_a_problem_in_the_runs_ledger_was_trained_on_wherever_it_lies_now(run):
    data = config_from_dict(read_json(run.config_file)["config"]).data
    problem, first, second = held_out(data, 300)[2], *load_problems(data, "train")[:2]
    whole = json.dumps({"step": 1, "problem_ids": [first.id]}) + "\n"
    run.ledger_file.write_text(whole + whole[:20])  # what a full disk leaves of the last line
    assert decide(run) == 0
    run.ledger_file.write_text(whole[:20] + "\n" + whole)
    with pytest.raises(BadInput, match=r"ledger\.jsonl:1 is damaged: it is not JSON"):
        decide(run)
    run.ledger_file.write_text(whole)
    with open(run.ledger_file, "a") as file:
        file.write(json.dumps({"step": 2, "problem_ids": [second.id, problem.id]}) + "\n")
    with pytest.raises(CheckFailed, match=r"1 of 4 held-out problems were trained on: .*ledger.jsonl lists .*round 2"):
        decide(run)
    assert not promoted(run)


def test_a_promotion_written_by_hand_is_taken_back(run):
    edit(run, "gain", "fp8", value=estimate(0.0, -0.1, 0.1))
    manifest = run.merged / "grpo" / "fp8" / MANIFEST
    write_json(manifest, {**read_json(manifest), "promoted": True})
    assert decide(run) == 1 and not promoted(run)


def test_what_is_not_merged_yet_is_named_one_by_one_with_a_command_that_is_not_refused(tmp_path):
    """As `merge --compare_bases` leaves a run: the policy in bf16 and nothing of the base."""
    run = RunDir(tmp_path)
    write_json(run.base_file, BASE)
    (run.merged / "grpo" / "bf16").mkdir(parents=True)
    (run.merged / "grpo" / "bf16" / "manifest.json").write_text("{}")
    with pytest.raises(BadInput) as refused:
        find_sources(run, ["nf4", "bf16", "fp8"])
    places = ", ".join(str(run.merged / cell) for cell in ("base/bf16", "base/fp8", "grpo/fp8"))
    assert f"not merged yet: {places}. Merge with" in str(refused.value)
    assert str(refused.value).endswith(" --format bf16 fp8 --overwrite")
    with pytest.raises(BadInput, match=r"--format fp8$"):
        find_sources(run, ["fp8"])
