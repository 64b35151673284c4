"""Completions from vLLM's offline engine, in a child process that releases its GPU memory when it ends.

Covers: every format that vLLM loads on the machine, several GPUs (`server.tensor_parallel`), vLLM's own error line if
it does not. Not covered: nf4, which vLLM 0.28 and later leave to a plugin: its cells go through transformers.
"""

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from eval.backends import Answers, Asking, encode
from eval.generate import finish, sample_key
from eval.vllm_log import is_echo, last_error
from kit.core.config.schema import ServerConfig
from kit.core.errors import CheckFailed

ROOT = Path(__file__).resolve().parents[1]
WORKER = [sys.executable, "-m", "eval.vllm_worker"]


def ask_vllm(place: Path, asking: Asking, server: ServerConfig, log: Path) -> Answers:
    """Return the `Answers` of the checkpoint at `place`; `server` sets the engine's size.

    Each (problem, sample) is a request with its own seed, which alone determines that request's random numbers in
    vLLM. `log` holds vLLM's output and is removed on success; `CheckFailed` has its last error line.
    """
    encoded = encode(place, asking)
    places = list(itertools.product(range(len(encoded.prompts)), range(asking.samples)))
    request = {
        "model": str(Path(place).resolve()),
        "prompts": encoded.prompts,
        "places": [problem for problem, _ in places],
        "seeds": [sample_key(asking.seed, *row) % (1 << 63) if asking.temperature > 0 else None for row in places],
        "stops": encoded.stops,
        "temperature": asking.temperature,
        "max_new_tokens": asking.max_new_tokens,
        "max_model_len": max(map(len, encoded.prompts)) + asking.max_new_tokens,
        "size": engine_size(server),
    }
    with tempfile.TemporaryDirectory(prefix="eval-vllm-") as folder:
        answer = _run_worker(request, Path(folder), environment(server), log)
    made = [finish(encoded.tokenizer, row, encoded.stops, asking.max_new_tokens) for row in answer["rows"]]
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    answer = json.loads(answer_file.read_text()) if answer_file.is_file() else {}
    if code == 0 and "rows" in answer:
        log.unlink()
        return answer
    reason = failure(answer.get("error"), log.read_text(errors="replace"), code)
    raise CheckFailed(f"vLLM did not answer for {request['model']}: {reason}\nvLLM's log: {log}. {advice(reason)}")


def failure(error: str | None, log: str, code: int) -> str:
    """Why the worker failed: the exception it caught, else the last error line of its log, else how it ended."""
    if error and not is_echo(error):
        lines = [line.strip() for line in error.splitlines() if line.strip()]
        if "validation error" not in lines[0]:
            return lines[0]
        # pydantic's first line counts the errors; each then has its field, what is wrong, and a link
        told = [line.partition(" [type=")[0] for line in lines if not line.startswith("For further information")]
        return " ".join(told)[:400]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if found := last_error(lines):
        return found
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name} (the kernel does that when memory runs out)"
    return f"its process ended with exit code {code}: {lines[-1] if lines else 'no output'}"


def advice(reason: str) -> str:
    """Suggest what to do about a failure."""
    text = reason.lower()
    if any(sign in text for sign in ("memory", "kv cache", "sigkill")):
        return (
            "Reduce its memory: lower server.max_num_seqs or eval.max_new_tokens, set server.kv_cache_gib, or "
            "spread it with server.tensor_parallel."
        )
    if any(sign in text for sign in ("support", "quantization", "capability", "notimplemented", "kernel")):
        return (
            "vLLM has no kernel for this format on this machine: leave the format out with --formats, or measure it "
            "with --eval.backend transformers."
        )
    return "Measure with --eval.backend transformers, or continue with --reuse once it is fixed."
