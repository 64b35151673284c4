"""Serve a run's merged checkpoints with vLLM, one after another, and measure what serving each of them costs:

    python -m eval.serving --run runs/tiny --formats bf16 fp8 awq nvfp4a16
    python -m eval.serving --run runs/tiny --formats fp8 --model original=runs/tiny/merged-original/grpo/fp8

For every format, start a real vLLM OpenAI server, stream the same requests at each concurrency (prompts of random
token ids, all different, prefix cache off, exact lengths, greedy), and stop the server. Writes serving.json after each
format, and prints a table. If vLLM cannot serve a format on this machine, its error is recorded, the other formats go
on, and the exit code is 1.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from eval import vllm_log
from eval.artifacts import POLICIES, merge_missing
from eval.machine import VLLM, machine, missing_kernel, package_versions
from eval.serving_client import closed_loop, make_prompts, summarize, vocabulary
from kit.core.cards import part_fault
from kit.core.errors import CHECK_FAILED, DONE, BadInput, CheckFailed, Interrupted, run_command
from kit.core.file_kinds import MODEL_CONFIG
from kit.core.formats import FORMATS
from kit.core.run_directory import RunDir, manifest_as_written, read_manifest, write_record
from kit.core.run_files import read_object
from kit.core.yaml_files import parse_yaml
from launch.replicas import Replicas, Stopped, read_end
from launch.vllm_command import Installed, Plan, installed_vllm

DECIDED = ("model", "served_model_name", "host", "port", "api_key", "uds")  # what the benchmark sets itself
WARM_UP_TOKENS = 16
PACKAGES = (*VLLM, "torch", "transformers", "compressed-tensors")
WHOLE_LOG = 1 << 24  # bytes
BLURRED = 1.5  # tokens per chunk, above which first tokens come late and times between tokens say little


@dataclass(frozen=True)
class Settings:
    """A checked benchmark: everything that can be refused before a server starts has been."""

    checkpoints: dict[str, Path]
    batches: list[int]
    prompt_tokens: int
    new_tokens: int
    requests_per_batch: int
    min_requests: int
    seed: int
    vllm: Installed
    options: dict[str, Any]
    wait_s: float
    logs: Path
    out: Path
    policy: str | None
    ids: list[int] = field(repr=False, default_factory=list)

    def requests(self, batch: int) -> int:
        return max(batch * self.requests_per_batch, self.min_requests, batch)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--run", help="run directory, e.g. runs/tiny; its merged checkpoints are served")
    parser.add_argument("--formats", nargs="+", help="formats to serve; default: all that are merged")
    parser.add_argument("--policy", choices=POLICIES, default="grpo", help="whose checkpoints; default grpo")
    parser.add_argument(
        "--model", nargs="+", default=[], help="other checkpoints: PATH, named by its folder, or NAME=PATH"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[2**n for n in range(9)], help="concurrent requests")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="tokens of every prompt")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens of every completion")
    parser.add_argument("--requests_per_batch", type=int, default=2, help="waves of requests at each concurrency")
    parser.add_argument("--min_requests", type=int, default=8, help="requests at small concurrencies, for percentiles")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.9, help="share of the GPU that vLLM takes")
    parser.add_argument("--wait_s", type=float, default=900.0, help="longest wait for a server to start, seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--vllm_args", nargs="+", default=[], help="vLLM's own options, e.g. tensor_parallel_size=2 enforce_eager=true"
    )
    parser.add_argument("--out", type=Path, help="folder of serving.json and logs; default: the run directory")
    parser.add_argument("--dry_run", action="store_true", help="check everything, then exit")
    return parser.parse_args(argv)


def check(arguments: argparse.Namespace) -> Settings:
    """Check the benchmark before a server starts; `BadInput` names everything that cannot work."""
    if arguments.run is None and not arguments.model:
        raise BadInput("name what to serve: --run runs/NAME, or --model PATH with --out.")
    if arguments.run is None and arguments.out is None:
        raise BadInput("--model without --run needs --out, the folder for serving.json.")
    least = {"prompt_tokens": 1, "new_tokens": 1, "requests_per_batch": 1, "min_requests": 1}
    wrong = [f"--{name} must be at least {low}" for name, low in least.items() if getattr(arguments, name) < low]
    if min(arguments.batches) < 1 or len(set(arguments.batches)) != len(arguments.batches):
        wrong.append(f"--batches must be different numbers of at least 1, they are {arguments.batches}")
    if not 0 < arguments.gpu_memory_utilization <= 1:
        wrong.append(f"--gpu_memory_utilization ({arguments.gpu_memory_utilization}) must be above 0 and at most 1")
    if wrong:
        raise BadInput(f"{'; '.join(wrong)}.")
    own_options = vllm_options(arguments.vllm_args)
    checkpoints = find_checkpoints(arguments)
    longest = arguments.prompt_tokens + arguments.new_tokens
    for name, path in checkpoints.items():
        config = read_object(path / "config.json", MODEL_CONFIG)
        room = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
        if room and longest > room:
            raise BadInput(
                f"--prompt_tokens {arguments.prompt_tokens} and --new_tokens {arguments.new_tokens} are {longest} "
                f"tokens, {name} has {room} positions. Ask for fewer."
            )
    vllm, out = installed_vllm(), Path(arguments.out or arguments.run)
    options: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_seqs": max(arguments.batches),
        "enable_prefix_caching": False,
        "generation_config": "vllm",  # the model's own sampling settings may cost time, and differ
        "disable_uvicorn_access_log": True,
    }
    if not vllm.is_cpu:
        if fault := part_fault(os.environ):
            raise BadInput(fault)
        options["gpu_memory_utilization"] = arguments.gpu_memory_utilization
    return Settings(
        checkpoints=checkpoints,
        batches=sorted(arguments.batches),
        **{name: getattr(arguments, name) for name in least},
        seed=arguments.seed,
        vllm=vllm,
        options=options | own_options,
        wait_s=arguments.wait_s,
        logs=(out / "logs").resolve(),
        out=out,
        policy=arguments.policy if arguments.run else None,
        ids=vocabulary(list(checkpoints.values())),
    )


def find_checkpoints(arguments: argparse.Namespace) -> dict[str, Path]:
    """{format or folder name: directory} of the checkpoints to serve, complete by their manifests if they have one."""
    found: dict[str, Path] = {}
    if arguments.run is not None:
        run = RunDir.open(arguments.run)
        folder = run.merged / arguments.policy
        there = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
        merged = [name for name in there if not name.startswith(".")]
        wanted = list(dict.fromkeys(arguments.formats or (() if arguments.model else merged)))
        if missing := [name for name in wanted if name not in merged]:
            raise BadInput(
                f"not merged yet: {', '.join(str(folder / name) for name in missing)}. Make it with: "
                f"{merge_missing(run, [(arguments.policy, name) for name in missing])}"
            )
        if not wanted and not arguments.model:
            raise BadInput(
                f"{folder} holds no checkpoint. Make one: python -m merge --run {run.as_argument} --format bf16"
            )
        rank = {name: place for place, name in enumerate(FORMATS)}
        for name in sorted(wanted, key=lambda name: (rank.get(name, len(rank)), name)):
            read_manifest(folder / name, "checkpoint", deep=True)
            found[name] = folder / name
    elif arguments.formats:
        raise BadInput("--formats names checkpoints of a run: pass --run too.")
    for word in arguments.model:
        given, equals, rest = word.partition("=")
        path = Path(rest) if equals and not Path(word).exists() else Path(word)
        name = given if path == Path(rest) and equals else path.resolve().name
        if name in found:
            raise BadInput(f"two checkpoints are called {name}: {found[name]} and {path}. Write NAME={path}.")
        found[name] = path
    for path in found.values():
        if not (path / "config.json").is_file():
            raise BadInput(f"{path} is not a checkpoint: it has no config.json.")
    return {name: path.resolve() for name, path in found.items()}


def vllm_options(words: list[str]) -> dict[str, Any]:
    """Parse `key=value` words into vLLM's options; values are read as YAML, so true, 2 and {a: b} keep their types."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        if not equals:
            raise BadInput(f"--vllm_args takes key=value, got {word!r}; a bare flag is written {key}=true.")
        if key in DECIDED:
            raise BadInput(f"--vllm_args names {key}, which the benchmark sets. Remove it.")
        try:
            options[key] = parse_yaml(value)
        except ValueError as error:
            raise BadInput(f"--vllm_args {key}={value:.60} is not YAML: {error}.") from None
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure every format, write serving.json; return 0 if all were served, 1 if one was not."""
    arguments = parse_arguments(argv)
    settings = check(arguments)
    lengths = f"{settings.prompt_tokens} prompt and {settings.new_tokens} new tokens"
    print(
        f"serving {', '.join(settings.checkpoints)} with vLLM {settings.vllm.version}: {lengths}, "
        f"{', '.join(map(str, settings.batches))} requests at a time",
        flush=True,
    )
    for name, path in settings.checkpoints.items():
        print(f"  {name}: {path}", flush=True)
        if stop := manifest_as_written(path).get("stop"):
            print(
                f"    clients must send stop {json.dumps(stop)}: the policy ends there, vLLM does not know", flush=True
            )
    if arguments.dry_run:
        return DONE
    settings.out.mkdir(parents=True, exist_ok=True)
    result: dict = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["python", "-m", "eval.serving", *(sys.argv[1:] if argv is None else argv)],
        "versions": package_versions(PACKAGES),
        "machine": machine(),
        "policy": settings.policy,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "seed": settings.seed,
        "options": settings.options,
        "formats": {},
        "failed": {},
    }
    file = settings.out / "serving.json"
    for name in settings.checkpoints:
        try:
            result["formats"][name] = measure(settings, name)
        except CheckFailed as error:
            log = log_file(settings, name)
            told = {"error": str(error).splitlines()[0], "log": str(log) if log.is_file() else None}
            result["failed"][name] = told
            print(f"{name}: failed: {told['error']}" + (f"\n  log: {log}" if told["log"] else ""), flush=True)
        except (Stopped, KeyboardInterrupt) as error:
            done = ", ".join((*result["formats"], *result["failed"]))
            kept = f"{file} holds {done}" if done else f"{file} was not written"
            ended = f"the server was ended, {kept}"
            if isinstance(error, KeyboardInterrupt) or error.args == (signal.SIGINT,):
                raise Interrupted(f"interrupted: {ended}") from None
            raise CheckFailed(f"stopped; {ended}.") from None
        write_record(file, result)  # a format takes minutes: keep what is measured if the next one is interrupted
    print(table(result))
    print(f"written: {file}; servers' logs in {settings.logs}", flush=True)
    return CHECK_FAILED if result["failed"] else DONE


def measure(settings: Settings, name: str) -> dict:
    """Start one format's server, measure every concurrency, stop the server; return its row of serving.json."""
    path = settings.checkpoints[name]
    if reason := missing_kernel(path):
        raise CheckFailed(f"{reason}. Serve another format, bf16 for example.")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"model": str(path), "served_model_name": "model", "host": "127.0.0.1", "port": port}
    # The memory of weights and KV cache is read from what vLLM logs at INFO.
    environment = {"VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"), "VLLM_LOGGING_LEVEL": "INFO"}
    if settings.vllm.is_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; otherwise vLLM takes most of the machine's memory
    log = log_file(settings, name)
    url = f"http://127.0.0.1:{port}"
    plan = Plan(url, "127.0.0.1", port, None, place | settings.options, environment, log)
    with Replicas([plan]) as replicas:

        def check_alive() -> None:
            try:
                replicas.check_alive()
            except CheckFailed as error:
                raise CheckFailed(vllm_log.last_error(read_end(log)) or str(error)) from None

        started = time.perf_counter()
        replicas.start()
        wait_ready(check_alive, url, settings.wait_s)
        start_s = time.perf_counter() - started
        facts = memory(read_end(log, WHOLE_LOG), settings)
        print(f"{name}: ready after {start_s:.0f} s", flush=True)
        rows = []
        for batch in settings.batches:
            length, count = settings.prompt_tokens, settings.requests(batch)
            # Seeded only by the concurrency, so every format answers the same requests.
            warm_up = make_prompts(settings.ids, batch, length, (settings.seed, batch, 1))
            prompts = make_prompts(settings.ids, count, length, (settings.seed, batch, 0))
            closed_loop(url, warm_up, min(settings.new_tokens, WARM_UP_TOKENS), batch, check_alive)
            found = closed_loop(url, prompts, settings.new_tokens, batch, check_alive)
            rows.append(summarize(*found, batch, settings.new_tokens))
            print(f"{name}: {line(rows[-1])}", flush=True)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if blurred := [row["batch"] for row in rows if row["tokens_per_chunk"] > BLURRED]:
        facts["notes"].append(
            f"with {', '.join(map(str, blurred))} requests at a time the server sent several tokens at once "
            "(tokens_per_chunk): times to the first token and between tokens are unreliable there"
        )
    return {**facts, "start_s": round(start_s, 2), "bytes": size, "batches": rows}


def log_file(settings: Settings, name: str) -> Path:
    return settings.logs / f"serving-{name}.log"


def wait_ready(check_alive: Callable[[], None], url: str, wait_s: float) -> None:
    """Wait until the server answers /health; `CheckFailed` if it ends first or `wait_s` seconds pass."""
    deadline = time.monotonic() + wait_s
    while True:
        check_alive()
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        if time.monotonic() > deadline:
            raise CheckFailed(f"the server was not ready within {wait_s:g} s (--wait_s).")
        time.sleep(0.2)


def memory(log: list[str], settings: Settings) -> dict:
    """The memory that vLLM logged, and {"notes": [...]} on what it does not log or does not suffice."""
    result, notes = vllm_log.memory(log), []
    if result["weights_gib"] is None:
        notes.append("this vLLM does not log the memory of the weights; bytes is their size on disk")
    if result["kv_cache_gib"] is None:
        notes.append("this vLLM does not log the memory of the KV cache")
    tokens, needed = result["kv_cache_tokens"], max(settings.batches) * (settings.prompt_tokens + settings.new_tokens)
    if tokens is not None and tokens < needed:
        notes.append(
            f"{max(settings.batches)} requests need {needed:,} tokens of KV cache and there are {tokens:,}: part of "
            "the largest batches has to wait"
        )
    return result | {"notes": notes}


def line(row: dict) -> str:
    """One progress line for a measured concurrency, in a fixed order."""
    between = "-" if row["itl_p50_s"] is None else f"{1000 * row['itl_p50_s']:.1f}"
    return (
        f"batch {row['batch']:>3}  {row['tokens_per_s']:>9,.0f} tok/s  first token p50 {1000 * row['ttft_p50_s']:.0f} "
        f"p95 {1000 * row['ttft_p95_s']:.0f} ms  latency p50 {row['latency_p50_s']:.2f} "
        f"p95 {row['latency_p95_s']:.2f} s  between tokens p50 {between} ms"
    )


def table(result: dict) -> str:
    """serving.json for the terminal: one line per format and concurrency, memory, failures."""
    shown = lambda gib: "-" if gib is None else f"{gib:.2f}"  # noqa: E731
    width = max([6, *(len(name) for name in (*result["formats"], *result["failed"]))])
    lines = [f"{result['machine']}, {json.dumps(result['versions'])}"]
    for name, found in result["formats"].items():
        lines.append(
            f"{name:<{width}}  weights {shown(found['weights_gib'])} GiB, KV cache {shown(found['kv_cache_gib'])} "
            f"GiB, {found['bytes'] / 2**30:.3g} GiB on disk, ready after {found['start_s']:.0f} s"
        )
        lines += [f"{name:<{width}}  note: {note}" for note in found["notes"]]
        lines += [f"{name:<{width}}  {line(row)}" for row in found["batches"]]
    lines += [f"{name:<{width}}  failed: {found['error']}" for name, found in result["failed"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
