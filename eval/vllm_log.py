"""Read vLLM's log: why it failed, and how much memory it took."""

import re
from collections.abc import Sequence

_ERROR = re.compile(r"\b((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Killed)\b:? .*)")
# The parents of the process that failed report that it failed but not why.
_ECHO = re.compile(r"(Engine core|WorkerProc) initialization failed|See root cause above")
_PREFIX = re.compile(r"^\([\w ]+pid=\d+\)")
# vllm/v1/worker/gpu_model_runner.py, gpu_worker.py, cpu_worker.py and v1/core/kv_cache_utils.py of 0.26 and 0.31.
_MEMORY = {
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "kv_cache_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB|set \(([\d.]+)/[\d.]+\) GiB for KV cache"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
}


def is_echo(text: str) -> bool:
    """Whether an error only points to another process's error."""
    return _ECHO.search(text) is not None


def last_error(lines: Sequence[str]) -> str | None:
    """The last error in a log that gives a reason; None if there is none."""
    found = None
    for number, text in enumerate(lines):
        if (match := _ERROR.search(text)) and not is_echo(text):
            # pydantic gives the reason on the line after it.
            more = lines[number + 1 : number + 2] if "validation error" in match[1] else []
            found = " ".join([match[1].strip(), *(_PREFIX.sub("", line).strip() for line in more)])[:500]
    return found


def memory(lines: Sequence[str]) -> dict[str, float | int | None]:
    """{"weights_gib", "kv_cache_gib", "kv_cache_tokens"} as logged, None for what vLLM does not log."""
    text, found = "\n".join(lines), {}
    for key, pattern in _MEMORY.items():
        # With tensor parallelism there is one line per worker: take the fullest GPU.
        values = [next(filter(None, match.groups())).replace(",", "") for match in pattern.finditer(text)]
        found[key] = max(map(int if key.endswith("tokens") else float, values), default=None)
    return found
