"""Time of a decoding step of a rollout server: ms by context, kernels on the card, effects of vLLM's settings.

    python bench/decode_profile.py --model /tmp/bench_step/base --sequences 16 32 --out decode.json
    python bench/decode_profile.py --shape 8b --variants fp8+kv w4a16+kv nvfp4a16+kv --kv_gib 12 --out decode.json

Long completions are a series of decoding steps, so their speed is that of a step. For every variant, a vLLM engine in
a process of its own, with the kit's sampling (temperature 1, the sampled token's log-prob, no detokenizing), generates
--new tokens for this many sequences at once, each with a different random prompt of --prompt tokens. `early` and
`late` are mean ms per step over the first and the last eighth of the completions, `total` is the whole time in
seconds. Then torch's profiler records --profiled steps in the worker, after prompts of --prompt tokens and after
prompts nearly as long as the completions: the card's ms per step by kernel group, its idle time, and the most
expensive kernels. Needs CUDA and vllm. Prints the table last. A variant that is out of time keeps what it measured;
SIGTERM ends the command with what there is.

Variants, joined by +: `bf16`, `stored` (in the format of the checkpoint --model), `fp8` (per channel, as
server.weights has it), `w4a16` or `nvfp4a16` (of --shape; the kernel that vLLM chooses for them), `marlin` (in its
place), `kv` (FP8 KV cache, server.kv_cache fp8), `ngram` (server.speculation ngram, four drafts), `ngram_gpu` (the
same looked up on the card, with async scheduling), `fused` (vLLM's own kernels for norm and quantization, activation
and quantization in place of Inductor's) or `rope` (for the norms of queries and keys with the rotary embedding),
`torch` (cuBLAS in place of CUTLASS), `triton` or `flashinfer` (for attention in place of FlashAttention), `tp2` (two
cards for one engine).

`--words 2` lets the sampler choose between two tokens only, so that random weights write a text in which drafts of
n-grams are accepted about half of the time; `--words 1`, always. `per pass` is the mean of tokens that a sequence gets
by one pass, `pass ms` the mean time of a pass: drafts pay where `per pass` is above the ratio of `pass ms` with and
without.
"""

import argparse
import contextlib
import fcntl
import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))

from memory_child import SHAPES, make_directory

ROOT = Path(__file__).parents[1]

FUSED = {
    "custom_ops": ["+quant_fp8", "+rms_norm", "+silu_and_mul"],
    "pass_config": {"fuse_norm_quant": True, "fuse_act_quant": True},
}
ROPE = {"custom_ops": ["+rms_norm", "+rotary_embedding"], "pass_config": {"enable_qk_norm_rope_fusion": True}}
LEVERS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "stored": {},
    "fp8": {"quantization": "fp8_per_channel"},
    "kv": {"kv_cache_dtype": "fp8"},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
        "async_scheduling": False,  # as a server of the kit that drafts
    },
    "ngram_gpu": {
        "speculative_config": {
            "method": "ngram_gpu",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
        "async_scheduling": True,
    },
    "fused": {"compilation_config": FUSED},
    "rope": {"compilation_config": ROPE},
    "w4a16": {},
    "nvfp4a16": {},
    "marlin": {"linear_backend": "marlin"},
    "torch": {"linear_backend": "torch"},
    "triton": {"attention_backend": "TRITON_ATTN"},
    "flashinfer": {"attention_backend": "FLASHINFER"},
    "tp2": {"tensor_parallel_size": 2},
}
# The first match decides. Inductor names its kernels after everything that they replace, including products.
GROUPS = (
    ("between cards", r"cross_device|nccl|all_?reduce|all_?gather"),
    ("norm, activation, quantization", r"^triton_|norm_dynamic|NormRope"),
    ("attention", r"flash|attn|attention|mha|split_?kv|KVCache|combine|reshape_and_cache"),
    ("products", r"gemm|marlin|cutlass|nvjet|cublas|xmma|splitk|gemv|::mm"),
    ("sampling", r"softmax|gumbel|top_?k|argmax|logprob|sample|penalt|rand|philox|exponential|ranks"),
    ("norm, activation, quantization", r"norm|quant|silu|rotary|rope"),
)
TOP = 20
DRAFTING = {"ngram", "ngram_gpu"}
LAYOUTS = {"w4a16", "nvfp4a16"}  # written by `python -m merge`


def engine(options: argparse.Namespace, variant: str, traces: Path | None) -> Any:
    from vllm import LLM

    from kit.core.formats import FORMATS
    from merge.quantize import quantization_config

    keys: dict[str, Any] = {}
    for name in variant.split("+"):
        keys |= LEVERS[name]
        if name in LAYOUTS:
            keys["hf_overrides"] = {"quantization_config": quantization_config(FORMATS[name], ["lm_head"])}
    if options.shape:
        keys["load_format"] = "dummy"
    if options.kv_gib:
        keys["kv_cache_memory_bytes"] = int(options.kv_gib * 2**30)
    if traces is not None:
        keys["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
        }
    context = options.prompt + options.new + 1
    return LLM(
        model=str(options.model),
        dtype="bfloat16",
        max_model_len=context,
        max_num_seqs=max(options.sequences),
        max_logprobs=-1,
        logprobs_mode="processed_logprobs",
        gpu_memory_utilization=options.share,
        enforce_eager=options.rehearse,
        enable_prefix_caching=False,
        disable_log_stats=not DRAFTING & {*variant.split("+")},
        seed=0,
        **keys,
    )


def start(llm: Any, options: argparse.Namespace, count: int, new: int, prompt: int) -> Any:
    """Request `count` completions of `new` tokens on `prompt` ones; return the engine, not yet stepped."""
    import random

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    random.seed(0)
    loop = llm.llm_engine
    for number in range(count):
        ids = [random.randrange(10, 200) for _ in range(prompt)]
        kind = RequestOutputKind.FINAL_ONLY
        allowed = list(range(10, 10 + options.words)) if options.words else None
        params = SamplingParams(
            max_tokens=new,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=kind,
            allowed_token_ids=allowed,
        )
        loop.add_request(f"{new}-{prompt}-{number}", {"prompt_token_ids": ids}, params)
    return loop


def timed(llm: Any, options: argparse.Namespace, count: int) -> dict[str, float]:
    """ms per step early and late, total seconds, and tokens of a pass, of `count` sequences."""
    before = drafted(llm)
    loop, times = start(llm, options, count, options.new, options.prompt), [time.perf_counter()]
    while loop.has_unfinished_requests():
        loop.step()
        times.append(time.perf_counter())
    steps = [1e3 * (after - before) for before, after in pairwise(times)]
    eighth = max(1, len(steps) // 8)
    # A step of the loop takes what the engine sent since then, none or two of its steps: so no single ones are used.
    mean = {name: statistics.mean(part) for name, part in (("early", steps[8:eighth]), ("late", steps[-eighth:-8]))}
    total = times[-1] - times[0]
    accepted = drafted(llm) - before
    found = {"sequences": count, **mean, "total": total, "tok_s": count * options.new / total, "steps": len(steps)}
    return found | {"per_pass": count * options.new / (count * options.new - accepted)}


def drafted(llm: Any) -> int:
    """Accepted drafts since the engine's start; each is a token without a pass of its own."""
    if llm.llm_engine.log_stats:
        return sum(one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_accepted_tokens")
    return 0


SETTLE = 90  # steps until every prompt, of any length, has been processed


def profiled_tokens(options: argparse.Namespace) -> int:
    """New tokens that last for the steps of a profile; with drafts a step writes up to five."""
    return (options.profiled + SETTLE + 10) * (5 if DRAFTING & {*options.child.split("+")} else 1)


def profiled(llm: Any, options: argparse.Namespace, count: int, traces: Path, prompt: int) -> dict[str, Any]:
    """The card's ms per step by kernel group, from a trace of `--profiled` steps on prompts of `prompt` tokens."""
    before = set(traces.rglob("*.json*"))
    loop = start(llm, options, count, profiled_tokens(options), prompt)
    for _ in range(SETTLE):
        loop.step()
    llm.start_profile()
    for _ in range(options.profiled):
        loop.step()
    llm.stop_profile()
    while loop.has_unfinished_requests():
        loop.step()
    files = set(traces.rglob("*.json*")) - before
    return kernels(max(files, key=lambda file: file.stat().st_size), options.profiled)


def kernels(file: Path, steps: int) -> dict[str, Any]:
    """Kernels of a trace: ms per step by group, the most expensive ones, and the time without any."""
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
        events = json.load(stream)["traceEvents"]
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not found:
        return {"groups": {}, "top": [], "card": 0.0, "idle": 0.0}
    groups: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in found:
        name = event["name"]
        group = next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")
        groups[group] += event["dur"] / 1e3 / steps
        by_name[name].append(event["dur"])
    busy, until = 0.0, 0.0
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in found):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    span = until - min(event["ts"] for event in found)
    ranked = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:TOP]
    top = [
        {"kernel": name[:160], "ms": sum(spent) / 1e3 / steps, "calls": len(spent) / steps} for name, spent in ranked
    ]
    return {"groups": dict(groups), "top": top, "card": busy / 1e3 / steps, "idle": (span - busy) / 1e3 / steps}


def child(options: argparse.Namespace) -> None:
    """Run one variant in this process; print its figures as a line of JSON."""
    traces = options.out.with_suffix("") / f"trace-{options.child}"
    traces.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with open(options.out.with_suffix("") / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)  # held until the engine is up, so that none is timed while another starts
        llm = engine(options, options.child, traces)
        ready = time.perf_counter() - began
        fcntl.flock(turn, fcntl.LOCK_UN)
        fcntl.flock(turn, fcntl.LOCK_EX)
        timed(llm, argparse.Namespace(**vars(options) | {"new": 160}), options.sequences[0])  # warm-up
        found: list[dict[str, float]] = []
        profiles: dict[int, Any] = {}

        def say() -> None:
            figures = {"variant": options.child, "ready": ready, "rows": found, "profiles": profiles}
            print("FOUND " + json.dumps(figures), flush=True)

        for count in options.sequences:
            found.append(timed(llm, options, count))
            say()
        count, longest = options.sequences[0], options.prompt + options.new - profiled_tokens(options)
        lengths = sorted({options.prompt, max(options.prompt, longest)})
        for n in lengths:
            profiles[n] = profiled(llm, options, count, traces, n)
            say()


class Children:
    """The variants' processes. A process group of each, as an engine outlives the process that started it."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen] = []
        self.is_ended = False

    def run(self, variant: str, options: argparse.Namespace) -> tuple[str, dict[str, Any] | None, str, float]:
        """Run a variant; return it, its figures if there are any, what it missed, and seconds."""
        began, log = time.perf_counter(), options.out.with_suffix("") / f"{variant}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, __file__, *sys.argv[1:], "--child", variant]
        if self.is_ended:
            return variant, None, "not started", 0.0
        with open(log, "w") as file:
            process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            self.running.append(process)
            late = ""
            try:
                process.wait(options.limit_s)
            except subprocess.TimeoutExpired:
                late = f"out of time after {options.limit_s:.0f} s; "
            finally:
                self.kill(process)
                process.wait()
                self.running.remove(process)
        said = log.read_text(errors="replace").splitlines()
        figures = [line.removeprefix("FOUND ") for line in said if line.startswith("FOUND ")]
        other = "\n".join(line for line in said if not line.startswith("FOUND "))
        missed = f"{late}exit {process.returncode}: {other[-2000:]}" if process.returncode else ""
        return variant, json.loads(figures[-1]) if figures else None, missed, time.perf_counter() - began

    @staticmethod
    def kill(process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end(self, *signal_and_frame: Any) -> None:
        """End all of them; what they have measured is printed."""
        self.is_ended = True
        for process in [*self.running]:
            self.kill(process)


def table(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    for one in results:
        for context, profile in one["profiles"].items():
            parts = ", ".join(
                f"{name} {ms:.2f}" for name, ms in sorted(profile["groups"].items(), key=lambda p: -p[1])
            )
            print(
                f"\n{one['variant']}, {options.sequences[0]} sequences after {context} tokens: card "
                f"{profile['card']:.2f}, idle {profile['idle']:.2f} ms a step of the profile; {parts}"
            )
            for row in profile["top"]:
                print(f"  {row['ms']:7.3f} ms {row['calls']:6.1f} calls  {row['kernel'][:130]}")
    print(f"\nprompts of {options.prompt}, {options.new:,} new tokens")
    print(
        f"{'variant':16} {'sequences':>9} {'early ms':>9} {'late ms':>9} {'total s':>9} {'tok/s':>9} "
        f"{'per pass':>9} {'pass ms':>9}"
    )
    for one in results:
        for row in one["rows"]:
            print(
                f"{one['variant']:16} {row['sequences']:>9} {row['early']:>9.2f} {row['late']:>9.2f} "
                f"{row['total']:>9.2f} {row['tok_s']:>9,.0f} {row['per_pass']:>9.2f} "
                f"{1e3 * row['total'] * row['per_pass'] / options.new:>9.2f}"
            )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="what the server serves, e.g. a dequantized base")
    which.add_argument("--shape", choices=SHAPES, help="Qwen3's, with weights that vLLM makes up")
    parser.add_argument("--variants", nargs="+", default=["bf16", "fp8", "fp8+kv", "fp8+fused", "fp8+kv+fused"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 32], help="at once; the first is profiled")
    parser.add_argument("--prompt", type=int, default=250, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=4096, help="tokens of a completion")
    parser.add_argument("--words", type=int, help="tokens that the sampler chooses from; default all")
    parser.add_argument("--profiled", type=int, default=16, help="steps in the profile")
    parser.add_argument("--share", type=float, default=0.5, help="of the card's memory")
    parser.add_argument("--kv_gib", type=float, help="KV cache of every variant; then all of them start at once")
    parser.add_argument(
        "--limit_s", type=float, default=400, help="longest time of one variant; the first one compiles"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: no graphs, no kernels")
    parser.add_argument("--out", type=Path, required=True, help="JSON with every number; traces beside it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for variant in options.variants:
        if unknown := [name for name in variant.split("+") if name not in LEVERS]:
            parser.error(f"unknown {', '.join(unknown)} in {variant}; there are {', '.join(LEVERS)}")
        if options.model and LAYOUTS & set(variant.split("+")):
            parser.error(f"{variant} is of --shape; a checkpoint of --model is served as `stored`")
    most = max(profiled_tokens(argparse.Namespace(**vars(options) | {"child": one})) for one in options.variants)
    if options.new < (least := max(160, most)):
        parser.error(f"--new {options.new}: early, late and profiled steps need {least}")
    options.out = options.out.resolve()
    if options.shape:
        options.model = options.out.with_suffix("") / "model"
    return options


def main() -> None:
    options = read_options()
    if options.child:
        child(options)
        return
    if options.shape:
        make_directory(options.model, options.shape, 250)
        config = options.model / "config.json"
        longer = {"max_position_embeddings": options.prompt + options.new + 1}
        config.write_text(json.dumps(json.loads(config.read_text()) | longer))
    results, failed, children = [], [], Children()
    signal.signal(signal.SIGTERM, children.end)
    with ThreadPoolExecutor(len(options.variants) if options.kv_gib else 1) as pool:
        for variant, found, missed, seconds in pool.map(lambda one: children.run(one, options), options.variants):
            if found:
                results.append(found)
                options.out.write_text(json.dumps({"command": sys.argv, "results": results}, indent=1))
            if missed:
                failed.append(variant)
                print(f"{variant}: {missed}", flush=True)
            print(f"{variant}: {seconds:.0f} s", flush=True)
    table(results, options)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
