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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.backends import Answers, Asking, Encoded, encode
from eval.episodes import play
from eval.generate import Generation, finish, sample_key
from eval.vllm_log import is_echo, last_error
from kit.core.config.schema import ServerConfig
from kit.core.errors import CheckFailed
from kit.core.processor import INPUTS_IN_16_BITS

ROOT = Path(__file__).resolve().parents[1]
WORKER = [sys.executable, "-m", "eval.vllm_worker"]
POLL_S = 0.005


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
        "seeds": [_seed(asking, *row) for row in places],
        "stops": encoded.stops,
        "stop": [*asking.stop],
        "temperature": asking.temperature,
        "max_new_tokens": asking.max_new_tokens,
        "max_model_len": max(map(len, encoded.prompts)) + asking.max_new_tokens,
        "size": engine_size(server),
    }
    with tempfile.TemporaryDirectory(prefix="eval-vllm-") as folder, Worker(Path(folder), server, log) as worker:
        if asking.episodes is None:
            answer = worker.ask(request)
            given = encoded.stops, asking.max_new_tokens, encoded.texts
            made = [
                finish(encoded.tokenizer, row, *given, encoded.prompts[problem])
                for row, (problem, _) in zip(answer["rows"], places, strict=True)
            ]
        else:
            made, answer = _play(worker, request, encoded, asking)
    log.unlink()
    return Answers(made, "vllm", answer["dtype"], {"vllm": answer["version"]})


def _seed(asking: Asking, problem: int, sample: int, position: int = 0) -> int | None:
    """The seed of a request; the turns of an episode start at different positions."""
    if asking.temperature == 0:
        return None
    return sample_key(asking.seed + position * 1_000_003, problem, sample) % (1 << 63)


def _play(worker: "Worker", request: dict, encoded: Encoded, asking: Asking) -> tuple[list[Generation], dict]:
    """Play the episodes of a request, with an engine that answers one round of turns after another."""
    episodes, answer = asking.episodes, {}
    longest = episodes.config.rollout.max_prompt_length + asking.max_new_tokens

    def complete(
        prompts: list[list[int]], places: Sequence[tuple[int, int]], most: int, starts: Sequence[int]
    ) -> list[list[int]]:
        seeds = [_seed(asking, *place, start) for place, start in zip(places, starts, strict=True)]
        turns = {"prompts": prompts, "places": list(range(len(prompts))), "seeds": seeds, "max_new_tokens": most}
        answer.update(worker.ask(request | turns | {"max_model_len": longest}, is_last=False))
        return answer["rows"]

    return play(episodes, encoded.tokenizer, encoded.stops, asking.samples, complete), answer


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
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", **os.environ, **INPUTS_IN_16_BITS}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, math.ceil(server.kv_cache_gib or 1))))
    return found


class Worker:
    """The child process with the engine, from its first request on; ends with the block."""

    def __init__(self, folder: Path, server: ServerConfig, log: Path):
        self.folder, self.variables, self.log = folder, environment(server), log
        self.asked = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ask(self, request: dict, is_last: bool = True) -> dict:
        """The worker's answer; `CheckFailed` if it has none. It ends after the last."""
        self.asked += 1
        request_file = self.folder / f"request-{self.asked}.json"
        answer_file = self.folder / f"answer-{self.asked}.json"
        request_file.write_text(json.dumps(request | {"is_last": is_last}))
        if self.process is None:
            self._start(request_file, answer_file)
        else:
            with contextlib.suppress(BrokenPipeError):  # how it ended is found below
                self.process.stdin.write(f"{request_file}\n{answer_file}\n".encode())
                self.process.stdin.flush()
        if is_last:
            self.process.wait()
        while self.process.poll() is None and not answer_file.is_file():
            time.sleep(POLL_S)
        answer = json.loads(answer_file.read_text()) if answer_file.is_file() else {}
        if self.process.poll() in (0, None) and "rows" in answer:
            return answer
        reason = failure(answer.get("error"), self.log.read_text(errors="replace"), self.process.wait())
        raise CheckFailed(
            f"vLLM did not answer for {request['model']}: {reason}\nvLLM's log: {self.log}. {advice(reason)}"
        )

    def _start(self, request_file: Path, answer_file: Path) -> None:
        with open(self.log, "wb") as output:
            # A session of its own: everything that vLLM starts ends with it, however this process ends.
            self.process = subprocess.Popen(
                [*WORKER, str(request_file), str(answer_file)],
                env=self.variables,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


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
