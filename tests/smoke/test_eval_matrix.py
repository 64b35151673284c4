"""`python -m eval` and its gate on a run whose accuracies are known beforehand.

The model is built, not trained: one layer, and an output embedding that makes it a chain of characters. The base
answers \\boxed{7} to everything; the adapter turns the 7 into an 8. So on problems whose answers are 7, 8 and 5 the
whole matrix is known exactly.
"""

import errno
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval import page
from kit.core.run_directory import MANIFEST, RunDir, publish, read_manifest, write_json, write_manifest
from kit.core.run_files import read_json
from tests import processes, sandbox
from tests.conftest import ROOT
from tests.unit.merge_fixture import byte_tokenizer

SEVENS, EIGHTS, OTHERS = 10, 22, 8  # held-out problems by answer


def command(*arguments: object) -> subprocess.CompletedProcess:
    return processes.run([sys.executable, "-m", *map(str, arguments)])


def make_model(folder: Path) -> None:
    """A Qwen3 that says \\boxed{7} and stops, whatever it is asked; the direction of an 8 after `{` changes that."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1e-3 if "o_proj" in name or "down_proj" in name else 0.05)
        embedding, head = model.model.embed_tokens.weight.normal_(), model.lm_head.weight.normal_(0.0, 1e-3)
        ids = [tokenizer.convert_tokens_to_ids(c) for c in ["Ċ", *"\\boxed{7}", "<|im_end|>"]]
        for before, after in itertools.pairwise(ids):
            head[after] += 2 * torch.nn.functional.normalize(embedding[before], dim=0)
        eight, closing = tokenizer.convert_tokens_to_ids("8"), tokenizer.convert_tokens_to_ids("}")
        head[closing] += 2 * torch.nn.functional.normalize(embedding[eight], dim=0)
        head[eight] = torch.nn.functional.normalize(torch.randn(128), dim=0) * 2
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, do_sample=True, top_k=20)
    model.save_pretrained(folder)


def save_adapter(run: RunDir, model_dir: Path) -> None:
    """base.json, and an adapter whose down_proj answers the state after `{` with the direction of an 8."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer

    from kit.weights.frozen_base import hash_base, load_nf4

    model = load_nf4(model_dir, "float32", device="cpu")
    info = hash_base(model)
    write_json(run.base_file, {**info, "model": str(model_dir)})
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    seen = []
    down = model.model.layers[0].mlp.down_proj
    hook = down.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, -1].float()))
    with torch.no_grad():
        model(torch.tensor([tokenizer("x\n\\boxed{")["input_ids"]]))
    hook.remove()
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules=["down_proj", "q_proj"]))
    direction = model.lm_head.weight[tokenizer.convert_tokens_to_ids("8")].detach().float()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "down_proj.lora_A" in name:
                parameter.zero_()[0] = seen[0] / seen[0].square().sum()
            if "down_proj.lora_B" in name:
                parameter.zero_()[:, 0] = 2 * 128**0.5 * torch.nn.functional.normalize(direction, dim=0)
    with publish(run.adapter_dir(10)) as partial:
        peft_model.save_pretrained(partial)
        write_manifest(partial, "adapter", version=10, step=10, base_hash=info["hash"], rank=4, alpha=4)


def write_problems(folder: Path) -> None:
    answers = ["7"] * SEVENS + ["8"] * EIGHTS + ["5"] * OTHERS
    rows = [{"question": f"Which digit is drawn in round {i}?", "answer": a} for i, a in enumerate(answers)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"question": f"Which digit is trained in round {i}?", "answer": "8"} for i in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_run(folder: Path, *formats: str) -> RunDir:
    """A run with adapter and merged checkpoints whose accuracies are known."""
    from merge.__main__ import main as merge  # in this process, which has torch loaded already

    make_model(folder / "model")
    write_problems(folder)
    run = RunDir(folder / "run")
    run.path.mkdir()
    config = {
        "run": {"name": "tiny", "output_dir": str(run.path)},
        "model": {"id": "tiny", "path": str(folder / "model"), "dtype": "float32"},
        "rollout": {"max_completion_length": 16},
        "data": {
            "path": str(folder / "train.jsonl"),
            "eval_path": str(folder / "held_out.jsonl"),
            "prompt_suffix": "\nPut the final answer in \\boxed{}.",
        },
        "train": {"max_steps": 10},
        "eval": {"max_problems": 300, "bootstrap_samples": 2000},
    }
    write_json(run.config_file, {"config": config})
    save_adapter(run, folder / "model")
    assert merge(["--run", str(run.path), "--format", *formats]) == 0
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with merged bf16, fp8 and w4a16, evaluated; beside it what the evaluation printed."""
    run = build_run(tmp_path_factory.mktemp("eval"), "bf16", "fp8", "w4a16")
    evaluated = command("eval", "--run", run.path)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    return run, evaluated


@pytest.fixture
def run(made, tmp_path):
    """A copy of the evaluated run that a test may spoil."""
    return RunDir(shutil.copytree(made[0].path, tmp_path / "run"))


def test_the_matrix_has_the_accuracies_the_models_were_built_to_have(made):
    result = read_json(made[0].eval_file)
    n = SEVENS + EIGHTS + OTHERS
    assert result["n"] == n
    for name in ("nf4", "bf16", "fp8", "w4a16"):
        base, grpo = result["matrix"]["base"][name], result["matrix"]["grpo"][name]
        assert (base["correct"], grpo["correct"]) == (SEVENS, EIGHTS), name
        assert (base["strict"], grpo["strict"]) == (SEVENS / n, EIGHTS / n)
        for cell in (base, grpo):
            assert (cell["parse_rate"], cell["prompt_leak_rate"], cell["end_of_turn_rate"]) == (1.0, 0.0, 1.0)
            assert (cell["max_token_hits"], cell["undecided"], cell["mean_tokens"]) == (0, 0, 9.0)
        gain = result["gain"][name]
        assert gain["difference"] == pytest.approx((EIGHTS - SEVENS) / n)
        assert gain["discordant"] == [EIGHTS, SEVENS]
        assert gain["interval"][0] < gain["difference"] < gain["interval"][1]
    for name in ("nf4", "fp8", "w4a16"):
        assert result["gain_survival"][name]["difference"] == 0.0
        assert result["gain_survival"][name]["interval"][0] < 0  # 40 problems cannot show that nothing is ever lost
    assert "bf16" not in result["gain_survival"] and not any(key.startswith("gain_survival_") for key in result)
    assert (result["engine"], result["compute_dtype"]) in (("transformers", "float32"), ("transformers", "bfloat16"))
    assert f"Engine: transformers, computing in {result['compute_dtype']}" in (made[0].path / "eval.md").read_text()
    assert result["adapter_version"] == 10
    assert result["base_hash"] == read_json(made[0].base_file)["hash"]


def test_one_line_per_cell_and_one_record_per_completion(made):
    run, evaluated = made
    cells = [
        line for line in evaluated.stdout.splitlines() if line.startswith(("base ", "grpo ")) and "strict" in line
    ]
    assert [line.split()[:2] for line in cells] == [
        [policy, name] for name in ("nf4", "bf16", "fp8", "w4a16") for policy in ("base", "grpo")
    ]
    rows = [json.loads(line) for line in (run.path / "eval" / "grpo-fp8.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["problem_id"] for row in rows}) == SEVENS + EIGHTS + OTHERS
    assert {row["completion"] for row in rows} == {"\\boxed{8}"}
    assert {row["adapter_version"] for row in rows} == {10}
    assert (run.path / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert "| GRPO | fp8 | 55.0 |" in (run.path / "eval.md").read_text()


def test_report_redraws_from_eval_json_alone(run):
    (run.path / "eval.md").unlink()
    (run.path / "eval.png").unlink()
    assert page.main(["--run", str(run.path)]) == 0
    assert (run.path / "eval.md").is_file() and (run.path / "eval.png").is_file()


def test_the_gate_refuses_what_forty_problems_cannot_show_and_promotes_what_they_can(run):
    refused = command("eval", "gate", "--run", run.path, "--eval.gate.min_gain", "0.25")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "NOT SHOWN" in refused.stdout and "problems instead of 40 would decide" in refused.stdout
    assert read_json(run.merged / "grpo" / "fp8" / MANIFEST)["promoted"] is False
    loose = ("--eval.gate.min_gain=-0.5", "--eval.gate.max_quantization_loss=0.2")
    passed = command("eval", "gate", "--run", run.path, *loose)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    manifest = read_manifest(run.merged / "grpo" / "fp8", "checkpoint", deep=True)
    assert manifest["promoted"] is True and manifest["promotion"]["eval_hash"]
    assert read_json(run.merged / "grpo" / "bf16" / MANIFEST)["promoted"] is False


def test_an_evaluation_made_with_other_settings_cannot_be_gated(run):
    from eval import gate
    from eval import run as eval_run
    from kit.core.errors import BadInput

    other = ["--eval.seed", "7", "--eval.temperature", "0.5"]
    few = ["--run", str(run.path), "--formats", "bf16", "fp8", "--batch_size", "7"]
    assert eval_run.main([*few, *other]) == 0
    with pytest.raises(BadInput, match=r"eval\.temperature was 0\.5, it is 0\.0"):
        gate.main(["--run", str(run.path)])
    with pytest.raises(BadInput, match=r"eval\.seed was 7, it is 0"):
        gate.main(["--run", str(run.path), "--eval.temperature", "0.5"])
    assert gate.main(["--run", str(run.path), *other, "--eval.gate.max_policy_kl", "0"]) == 1


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda run: shutil.rmtree(run.merged / "grpo" / "fp8"), 2, "--format fp8"),
        (lambda run: shutil.rmtree(run.adapters), 2, "v000010 does not exist"),
        (lambda run: _append(run.merged / "base" / "bf16" / "model.safetensors"), 2, "is not whole"),
        (lambda run: _flip(run.merged / "grpo" / "w4a16" / "model.safetensors"), 2, "is damaged"),
        (lambda run: _edit(run.merged / "grpo" / "bf16", adapter_hash="0" * 64), 2, "hold different adapters"),
        (lambda run: _edit(run.merged / "base" / "fp8", base_hash="0" * 64), 2, "was made from another base"),
        (lambda run: _edit(run.merged / "grpo" / "fp8", policy="base"), 2, "holds base/fp8"),
        (lambda run: _edit(run.adapter_dir(10), tensor_hash="0" * 64), 2, "merged checkpoints were made from"),
        (lambda run: run.base_file.unlink(), 2, "base.json does not exist"),
        (lambda run: run.config_file.unlink(), 2, "not a run directory"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_load(run, spoil, code, message, monkeypatch):
    spoil(run)
    assert_refused(monkeypatch, ["--run", str(run.path), "--dry_run"], code, message)


def test_held_out_problems_that_were_trained_on_are_refused_with_examples(run, tmp_path, monkeypatch):
    leaking = tmp_path / "train.jsonl"
    leaking.write_text(json.dumps({"question": "which digit is  drawn in ROUND 3", "answer": "8"}) + "\n")
    arguments = ["--run", str(run.path), "--dry_run", f"--data.path={leaking}"]
    assert_refused(monkeypatch, arguments, 1, "Which digit is drawn in round 3?")


def test_a_dry_run_says_what_could_be_detected_and_writes_nothing(run, monkeypatch, capsys):
    from eval import run as eval_run

    monkeypatch.chdir(ROOT)
    run.eval_file.unlink()
    assert eval_run.main(["--run", str(run.path), "--dry_run", "--max_problems", "20"]) == 0
    assert "20 held-out problems" in (shown := capsys.readouterr().out) and "points are detectable" in shown
    assert not run.eval_file.exists()


def test_an_adapter_newer_than_the_merged_one_is_pointed_out_and_not_mixed_in(run, capsys):
    from eval import run as eval_run

    with publish(run.adapter_dir(20)) as partial:
        write_manifest(partial, "adapter", version=20, step=20, base_hash=read_json(run.base_file)["hash"])
    assert eval_run.main(["--run", str(run.path), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "adapter v10" in shown and "v000020 is newer" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "nf4", "int3"], "eval.formats must be some of"),
        (["--max_problem", "3"], "unknown argument --max_problem"),
        (["--max_problems", "0"], "eval.max_problems must be at least 1"),
        (["--batch_size", "0"], "must be at least 1"),
        (["--eval.gate.min_gian", "0"], "min_gain"),
    ],
)
def test_a_wrong_argument_is_bad_input(run, arguments, message, monkeypatch):
    assert_refused(monkeypatch, ["--run", str(run.path), "--dry_run", *arguments], 2, message)


def test_bad_input_leaves_the_process_with_two(tmp_path):
    missing = command("eval", "--run", tmp_path / "nowhere")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "no run directory" in missing.stderr


def test_an_evaluation_that_dies_leaves_the_last_eval_json_in_place(run, monkeypatch):
    from eval import run as eval_run

    before = run.eval_file.read_bytes()

    def die(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_run, "measure", die)
    with pytest.raises(KeyboardInterrupt):
        eval_run.main(["--run", str(run.path), "--formats", "bf16"])
    assert run.eval_file.read_bytes() == before


def test_a_disk_that_fills_is_told_by_its_error_number_and_leaves_the_last_eval_json(run, monkeypatch):
    from eval import run as eval_run

    before = run.eval_file.read_bytes()
    for place in ("write_cell", "write_record"):
        with monkeypatch.context() as patch:
            patch.setattr(eval_run, place, _full_disk)
            with pytest.raises(OSError, match="No space left") as caught:
                eval_run.main(["--run", str(run.path), "--formats", "bf16", "--max_problems", "3"])
        assert caught.value.errno == errno.ENOSPC
        assert run.eval_file.read_bytes() == before


def _full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def assert_refused(monkeypatch, arguments: list[str], code: int, message: str) -> None:
    """The command's own main, without the seconds that a new process takes; loading weights would fail the test."""
    from eval import run as eval_run
    from kit.core.errors import KitError

    monkeypatch.setattr(eval_run, "load_cell", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(KitError) as caught:
        eval_run.main(arguments)
    assert message in str(caught.value)
    assert caught.value.exit_code == code


def _append(file: Path) -> None:
    with open(file, "ab") as handle:
        handle.write(b"x")


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _edit(folder: Path, **fields: object) -> None:
    write_json(folder / MANIFEST, {**read_json(folder / MANIFEST), **fields})


def test_another_task_is_measured_beside_the_runs_own_and_in_its_words(run, tmp_path):
    from eval import run as eval_run
    from kit.core.errors import BadInput

    rows = [
        {"Body": f"In round {i} we draw", "Question": "Which digit?", "Answer": [7.0, 8.0][i % 2]} for i in range(6)
    ]
    (tmp_path / "svamp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = run.eval_file.read_bytes()
    arguments = ["--run", str(run.path), "--formats", "bf16"]
    assert eval_run.main([*arguments, "--task", "svamp", "--data", str(tmp_path / "svamp.jsonl")]) == 0
    assert run.eval_file.read_bytes() == own
    result = read_json(run.path / "eval-svamp" / "eval.json")
    assert (result["task"], result["scoring"], result["n"]) == ("svamp", "math", 6)
    assert [result["matrix"][policy]["bf16"]["correct"] for policy in ("base", "grpo")] == [3, 3]
    assert result["data"]["prompt_suffix"] == "\nPut the final answer in \\boxed{}."
    assert len((run.path / "eval-svamp" / "eval" / "grpo-bf16.jsonl").read_text().splitlines()) == 6
    assert (run.path / "eval-svamp" / "eval.md").is_file() and (run.path / "eval-svamp" / "eval.png").is_file()
    with pytest.raises(BadInput, match="give --task"):
        eval_run.main([*arguments, "--data", str(tmp_path / "svamp.jsonl")])


def test_another_task_scored_by_a_reward_function(run, tmp_path, monkeypatch):
    from eval import run as eval_run

    (tmp_path / "digit_reward.py").write_text(
        "def near(completions, gold, **kwargs):\n"
        "    said = [int(completion[-1]['content'][7]) for completion in completions]\n"
        "    return [1 - abs(one - int(other)) / 10 for one, other in zip(said, gold)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "A digit above 8?", "gold": "9"}\n{"prompt": "Five?", "gold": "5"}\n'
    )
    arguments = ["--run", str(run.path), "--formats", "bf16", "--task", "jsonl", "--data", str(tmp_path / "a.jsonl")]
    assert eval_run.main([*arguments, "--eval.reward=digit_reward:near", "--eval.reward_threshold=0.9"]) == 0
    cells = {policy: row["bf16"] for policy, row in read_json(run.path / "eval-jsonl" / "eval.json")["matrix"].items()}
    assert (cells["base"]["correct"], cells["grpo"]["correct"]) == (0, 1)
    assert cells["base"]["mean_reward"] == pytest.approx(0.8) and cells["grpo"]["mean_reward"] == pytest.approx(0.8)


def test_another_tasks_problems_are_compared_with_what_the_run_was_trained_on(run, tmp_path, monkeypatch):
    rows = [{"question": "Which digit is trained in round 3?", "answer": "#### 8"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    arguments = ["--run", str(run.path), "--formats", "bf16", "--task", "gsm8k", "--data", str(tmp_path / "a.jsonl")]
    assert_refused(monkeypatch, arguments, 1, "1 of 1 held-out problems are training problems")
    code = ["--run", str(run.path), "--formats", "bf16", "--task", "mbpp", "--data", str(tmp_path / "b.jsonl")]
    row = {"prompt": "Add.", "test_list": ["assert add(1, 2) == 3"]}
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    assert_refused(monkeypatch, code, 2, "--allow_code_execution")


def test_the_harness_counts_what_we_count_in_the_policys_own_words(run, capsys):
    from eval import harness

    assert harness.INSTALLED.is_relative_to(sandbox.side_environment("lm_eval"))
    assert harness.main(["--run", str(run.path), "--format", "bf16", "--num_fewshot", "2"]) == 0
    cell = read_json(run.path / "lm_eval.json")["cells"]["grpo/bf16"]
    n = SEVENS + EIGHTS + OTHERS
    found = {(score["task"], score["filter"]): score for score in cell["harness"]}
    boxed = found["kit_problems", "boxed"]
    assert (cell["ours"]["accuracy"], boxed["accuracy"], boxed["n"]) == (EIGHTS / n, EIGHTS / n, n)
    assert (boxed["difference"]["only_harness_right"], boxed["difference"]["only_ours_right"]) == (0, 0)
    # The model says \boxed{8} to everything: gsm8k's strict form is never met, its last number is the 8.
    assert found["kit_gsm8k", "strict-match"]["accuracy"] == 0
    assert found["kit_gsm8k", "flexible-extract"]["accuracy"] == EIGHTS / n
    assert found["kit_gsm8k", "flexible-extract"]["num_fewshot"] == 2
    assert any(text.startswith("examples: 2 worked ones") for text in cell["differences"]["kit_gsm8k"])
    assert not any("chat template" in text for text in cell["differences"]["kit_problems"])
    assert "Where the protocols differ" in capsys.readouterr().out
