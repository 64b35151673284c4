"""What the vLLM backend asks of its worker and makes of the way it ends, with small programs in the worker's place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from eval import vllm_backend
from eval.backends import Asking, check_backend
from eval.vllm_backend import ask_vllm, engine_size, environment, failure
from kit.core.config.schema import ServerConfig
from kit.core.errors import BadInput, CheckFailed
from tests import processes
from tests.unit.merge_fixture import byte_tokenizer
from tests.unit.test_eval_generate import QUESTIONS, ask

ANSWER = """
import json, sys
request = json.load(open(sys.argv[1]))
ids, stops = request["prompts"], request["stops"]
rows = [[*ids[place][:3], stops[0], 7] for place in request["places"]]
json.dump({"rows": rows, "dtype": "bfloat16", "version": "0.0"}, open(sys.argv[2], "w"))
json.dump(request, open(__file__ + ".json", "w"))
"""


@pytest.fixture
def place(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id, 5]).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """`worker(program)` puts a program in the worker's place; returns its file."""

    def put(program: str) -> Path:
        file = tmp_path / "worker.py"
        file.write_text(program)
        monkeypatch.setattr(vllm_backend, "WORKER", [sys.executable, str(file)])
        return file

    return put


def test_every_sample_is_a_request_of_its_own_prompt_and_seed(worker, place, tmp_path):
    file, tokenizer = worker(ANSWER), byte_tokenizer()
    answers = ask_vllm(place, Asking(ask(), 12, 0.7, samples=2), ServerConfig(), tmp_path / "log")
    request = json.loads(file.with_name(f"{file.name}.json").read_text())
    assert request["places"] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(set(request["seeds"])) == 10 and all(0 <= seed < 2**63 for seed in request["seeds"])
    assert request["stops"] == [tokenizer.eos_token_id, 5]
    for ids, question in zip(request["prompts"], QUESTIONS, strict=True):
        assert tokenizer.decode(ids) == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert request["max_model_len"] == max(map(len, request["prompts"])) + 12
    assert [(made.raw, made.tokens, made.ended) for made in answers.generations] == [("<|im_start|>us", 3, True)] * 10
    assert (answers.engine, answers.dtype, answers.versions) == ("vllm", "bfloat16", {"vllm": "0.0"})
    assert not (tmp_path / "log").exists()


def test_stop_texts_are_asked_for_and_end_what_is_read(worker, place, tmp_path):
    file = worker(ANSWER)
    answers = ask_vllm(place, Asking(ask(), 12, stop=["us"]), ServerConfig(), tmp_path / "log")
    assert json.loads(file.with_name(f"{file.name}.json").read_text())["stop"] == ["us"]
    # Of "<|im_start|>us" the text is "us", which its third token completes.
    assert [(made.raw, made.tokens, made.ended) for made in answers.generations] == [("<|im_start|>us", 3, True)] * 5
    answers = ask_vllm(place, Asking(ask(), 12, stop=["u"]), ServerConfig(), tmp_path / "log")
    assert {(made.raw, made.tokens, made.ended) for made in answers.generations} == {("<|im_start|>u", 2, True)}


@pytest.mark.parametrize("stop", [[], ["</answer>"]])
def test_the_engine_has_a_tokenizer_and_decodes_only_to_find_stop_texts(monkeypatch, stop):
    from eval import vllm_worker

    made = []
    note = lambda **given: made.append(given)  # noqa: E731
    fake = SimpleNamespace(LLM=note, SamplingParams=note, __version__="0.0")
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    request = {"stop": stop, "size": {}, "model": "m", "max_model_len": 9, "seeds": [1], "temperature": 1.0}
    request |= {"max_new_tokens": 4, "stops": [2], "prompts": [[1]], "places": [0]}
    vllm_worker._engine(request)
    loaded = SimpleNamespace(model_config=SimpleNamespace(dtype="bfloat16"))
    engine = SimpleNamespace(generate=lambda *_, **__: [], llm_engine=loaded)
    vllm_worker._complete(engine, request)
    assert made[0]["skip_tokenizer_init"] is not bool(stop)
    assert (made[1]["stop"], made[1]["detokenize"]) == (stop, bool(stop))


def test_seeds_hang_on_problem_and_sample_alone_and_greedy_needs_none(worker, place, tmp_path):
    file = worker(ANSWER)

    def seeds(**settings: object) -> list:
        ask_vllm(place, Asking(ask(), 12, **settings), ServerConfig(), tmp_path / "log")
        return json.loads(file.with_name(f"{file.name}.json").read_text())["seeds"]

    three = seeds(temperature=0.7, samples=3)
    assert three[::3] == seeds(temperature=1.0) != seeds(temperature=1.0, seed=1)
    assert seeds() == [None] * 5


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            "import json, sys\n"
            "json.dump({'error': 'ValueError: No available memory for the cache blocks.'}, open(sys.argv[2], 'w'))\n"
            "sys.exit(1)",
            ["ValueError: No available memory for the cache blocks.", "server.kv_cache_gib"],
        ),
        (
            "print('INFO loading'); print('(Worker pid=7) ERROR 11-21 12:00:00 [x.py:3] "
            "NotImplementedError: Only Cutlass FP4 is supported'); print('Traceback'); "
            "print('RuntimeError: Engine core initialization failed. See root cause above.'); raise SystemExit(1)",
            ["NotImplementedError: Only Cutlass FP4 is supported", "no kernel for this format", "--formats"],
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ["killed by SIGKILL", "server.max_num_seqs"]),
        (
            "print('what is this'); raise SystemExit(3)",
            ["ended with exit code 3: what is this", "--eval.backend transformers"],
        ),
        ("pass", ["ended with exit code 0: no output"]),
    ],
)
def test_a_worker_that_fails_is_told_by_its_own_words_and_what_helps(worker, place, tmp_path, program, says):
    worker(program)
    log = tmp_path / "cell.vllm.log"
    with pytest.raises(CheckFailed) as caught:
        ask_vllm(place, Asking(ask(), 12), ServerConfig(), log)
    assert all(part in str(caught.value) for part in [*says, str(log), str(place)]), caught.value
    assert log.is_file()


def test_the_reason_is_the_last_error_and_not_the_line_that_points_to_it():
    log = "a\nImportError: no x\nb\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n"
    assert failure(None, log, 1) == "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    assert failure("RuntimeError: Engine core initialization failed. See root cause above.", log, 1).startswith(
        "torch."
    )
    pydantic = (
        "ValidationError: 2 validation errors for SchedulerConfig\nmax_num_batched_tokens\n  Input should be >= 1 "
        "[type=greater_than_equal, input_value=0]\n    For further information visit https://errors.pydantic.dev\n"
        "max_num_seqs\n  Input should be >= 1 [type=greater_than_equal]"
    )
    assert failure(pydantic, log, 1) == (
        "ValidationError: 2 validation errors for SchedulerConfig max_num_batched_tokens Input should be >= 1 "
        "max_num_seqs Input should be >= 1"
    )


def test_an_evaluation_that_is_killed_takes_its_worker_with_it(tmp_path):
    """The real worker, whose engine is replaced by one that sleeps."""
    module = tmp_path / "vllm.py"
    module.write_text(
        "import os, sys, time\nopen(sys.argv[2] + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom eval import vllm_backend\n"
        "from kit.core.config.schema import ServerConfig\n"
        "folder = Path(sys.argv[1])\n"
        "vllm_backend.Worker(folder, ServerConfig(), folder / 'log').ask({'size': {}})\n"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], cwd=root, env=environment)
    pid = processes.wait_until(lambda: (file := tmp_path / "answer-1.json.pid").is_file() and file.read_text())
    parent.kill()
    parent.wait()
    assert processes.wait_until(lambda: not _alive(int(pid)))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed process whose parent is gone may wait for init to collect it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_run_says_how_large_the_engine_may_be():
    size = engine_size(ServerConfig(tensor_parallel=4, kv_cache_gib=0.5, max_num_seqs=32))
    assert (size["tensor_parallel_size"], size["kv_cache_memory_bytes"], size["max_num_seqs"]) == (4, 2**29, 32)
    assert "kv_cache_memory_bytes" not in engine_size(ServerConfig())


def test_an_evaluation_multiplies_4_bit_weights_by_inputs_in_16_bits_on_every_processor(monkeypatch):
    """As GPUs do, and as the replicas on a CPU that the run was trained with, whatever the user's shell has set."""
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert environment(ServerConfig())["VLLM_CPU_INT4_W4A8"] == "0"


def test_a_temperature_that_an_engine_would_change_or_refuse_is_refused():
    check_backend("transformers", 0.001, 1)
    check_backend("vllm", 0.01, 4)
    for backend in ("vllm", "server"):
        with pytest.raises(BadInput, match=r"0\.001\) is below 0\.01"):
            check_backend(backend, 0.001, 1)
    with pytest.raises(BadInput, match="greedy"):
        check_backend("vllm", 0.0, 2)
    check_backend("vllm", 2.5, 1)
    with pytest.raises(BadInput, match=r"\(2\.5\) is above 2"):
        check_backend("server", 2.5, 1)
