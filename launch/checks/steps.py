"""Steps that `launch.doctor` runs in child processes: imports, kernels, a quantization round trip, a token, a sum.

The doctor starts this file as a module with an open file descriptor number and the steps as JSON, each the name of a
function below and its arguments. They run in order. One JSON line is written to the descriptor when a step starts and
one when it ends. A step returns facts or raises; the exception becomes its fault.
"""

import difflib
import importlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.cards import generation
from kit.core.processor import INPUTS_IN_16_BITS

if TYPE_CHECKING:
    import torch

    from kit.core.config.schema import Config

# NF4 error of Gaussian weights in blocks of 64: 9.2 % of the norm, measured on CPU and H200. Wide enough for any seed.
NF4_ERROR = (0.085, 0.100)
# Cosine between the adapter's gradient and the true one. A repacked base gives 0.2 to 0.3 (bitsandbytes 0.50,
# AVX512-BF16).
LEAST_COSINE = 0.97
# Mean |Δlogp| against transformers in float32 on the small model: FP8 0.05, INT4 0.13 on CPU. Broken weights give
# whole nats.
MOST_DELTA = 0.25
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
PROMPT = list(range(3, 35))
# A process that owns shared memory until its input ends.
OWNER = """
import json, sys, torch
from kit.weights.shared_memory import describe, move_to_file
held = {"x": torch.arange(1000.0, device=sys.argv[1])}
print(json.dumps(describe(held, move_to_file(held.values()))), flush=True)
sys.stdin.read()
"""


def import_module(name: str) -> dict:
    """Import a module; the facts hold its warnings about incompatible versions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.import_module(name)
    texts = [str(one.message) for one in caught]
    return {"warnings": [text for text in texts if "supports" in text and "version" in text]}


def _half(index: int = 0) -> str:
    """The 16-bit dtype that a GPU computes in; bfloat16 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return "bfloat16"
    return generation(torch.cuda.get_device_capability(index)).dtypes[0]


def torch_devices() -> dict:
    """The devices torch sees, and the error of a matrix product on each, in 16 bits and FP8."""
    import torch

    from kit.weights.products import SHAPES as PRODUCTS
    from kit.weights.products import product_error

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": []}
    facts["available"] = torch.cuda.is_available()
    if not facts["available"]:
        if torch.version.cuda:
            try:
                torch.cuda.init()
            except Exception as error:  # its message is the reason to report
                facts["reason"] = str(error).strip().splitlines()[0]
        return facts
    left = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    right = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    exact = left @ right.T
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(index)
        a, b = left.to(device), right.to(device)
        half = _half(index)
        dtype = getattr(torch, half)
        errors: dict[str, float | str] = {}
        try:
            errors[half] = round(max(product_error(*one, device, dtype) for one in PRODUCTS), 5)
        except torch.OutOfMemoryError:  # other processes hold the card
            errors[half] = _error(a.to(dtype) @ b.to(dtype).T, exact)
        if generation(capability).trainer_fp8:
            one = torch.ones((), device=device)
            kind = torch.float8_e4m3fn
            try:
                product = torch._scaled_mm(
                    a.to(kind), b.to(kind).T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
                )
                errors["fp8"] = _error(product, exact)
            except RuntimeError as error:
                errors["fp8"] = str(error).splitlines()[0]
        facts["devices"].append(
            {"name": torch.cuda.get_device_name(index), "capability": capability, "errors": errors}
        )
    return facts


def _error(found: "torch.Tensor", exact: "torch.Tensor") -> float:
    return round(((found.float().cpu() - exact).norm() / exact.norm()).item(), 5)


def write_small_model(folder: Path) -> Path:
    """Save a Qwen3 with 0.4 M random weights in BF16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).bfloat16().save_pretrained(folder)
    return folder


def bitsandbytes_round_trip() -> dict:
    """Check NF4 on this device: round-trip error, a layer against its own dequantized weight, and the adapter's
    gradient after a forward in eval mode, which is when bitsandbytes repacks the weights on some processors."""
    import tempfile

    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM

    from kit.weights.frozen_base import dequantize, load_nf4

    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(device)
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    error = _error(dequantize_4bit(packed, state), weight.cpu())
    if not NF4_ERROR[0] <= error <= NF4_ERROR[1]:
        raise ValueError(f"NF4 of Gaussian weights is off by {error:.1%}, expected {NF4_ERROR[0]:.1%} to "
                         f"{NF4_ERROR[1]:.1%}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = load_nf4(write_small_model(Path(folder)), dtype=_half(), device=device)
        plain = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, _half()), trust_remote_code=False
        ).to(device)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    with torch.no_grad():
        for name, layer in layers.items():
            plain.get_submodule(name).weight.copy_(dequantize(layer))
    first = next(iter(layers))
    x = torch.randn(4, SHAPE["hidden_size"], device=device, dtype=getattr(torch, _half()))
    layer_error = _error(layers[first](x).detach(), plain.get_submodule(first)(x).detach().float().cpu())
    if layer_error > 0.02:
        raise ValueError(f"a Linear4bit is {layer_error:.1%} off the product with its own dequantized weight")
    cosine = _cosine(_adapter_gradient(model, device), _adapter_gradient(plain, device))
    if not cosine >= LEAST_COSINE:
        raise ValueError(
            f"the adapter's gradient has a cosine of {cosine:.3f} with the true one (least {LEAST_COSINE}): after a "
            "forward in eval mode the NF4 weights are no longer what they were"
        )
    return {"device": device.type, "error": error, "layer_error": layer_error, "cosine": round(cosine, 4)}


def _adapter_gradient(model: "torch.nn.Module", device: "torch.device") -> "torch.Tensor":
    """Gradient of a fixed adapter on fixed tokens, flattened to float32, after one forward in eval mode."""
    import torch
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    random = torch.Generator().manual_seed(1)
    trained = sorted((name, value) for name, value in wrapped.named_parameters() if value.requires_grad)
    with torch.no_grad():
        for _, value in trained:
            value.data = (torch.randn(value.shape, generator=random) * 0.05).to(device)
    tokens = torch.randint(0, SHAPE["vocab_size"], (4, 32), generator=random).to(device)
    half = getattr(torch, _half())
    with torch.no_grad(), torch.autocast(device.type, half):
        wrapped.eval()(input_ids=tokens)
    with torch.autocast(device.type, half):
        wrapped.train()(input_ids=tokens, labels=tokens).loss.backward()
    return torch.cat([value.grad.float().flatten().cpu() for _, value in trained])


def _cosine(one: "torch.Tensor", other: "torch.Tensor") -> float:
    return (one @ other / (one.norm() * other.norm())).item()


def vllm_token(weights: str | None) -> dict:
    """One token from vLLM with the small model in `server.weights` (None: unquantized), and its prompt log-probs
    against transformers' in float32."""
    import tempfile

    asked = [name for name in os.environ if name.startswith("VLLM_")]
    # One process, so that an error is raised here. The user's own settings win.
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", **INPUTS_IN_16_BITS}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    known = [name for name in vllm.envs.environment_variables if name.startswith("VLLM_")]
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        write_small_model(Path(folder))
        engine = LLM(
            model=folder,
            dtype=_half(),
            max_model_len=64,
            max_num_seqs=2,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            **_weights_options(weights, Path(folder)),
            # Leaves room on a GPU that is in use; the KV cache needs a few MiB.
            **({"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 26} if torch.cuda.is_available() else {}),
        )
        start_s = time.monotonic() - started
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False)
        answer = engine.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
        sampled = answer.outputs[0]
        ids = PROMPT + list(sampled.token_ids)
        given = [*answer.prompt_logprobs[1:], *sampled.logprobs]
        theirs = torch.tensor([place[token].logprob for place, token in zip(given, ids[1:], strict=True)])
        ours = _log_probs(folder, ids)
    delta = (theirs - ours).abs().mean().item()
    if not delta <= MOST_DELTA:
        raise ValueError(
            f"vLLM's log-probs are {delta:.2f} nats a token from transformers' on the same weights (most {MOST_DELTA})"
        )
    unknown = {name: difflib.get_close_matches(name, known, n=1) for name in asked if name not in known}
    facts = {"version": vllm.__version__, "token": sampled.token_ids[0], "delta": round(delta, 4)}
    return facts | {"start_s": round(start_s, 1), "unknown": unknown}


def _weights_options(weights: str | None, folder: Path) -> dict:
    """vLLM's options for a model in a directory that is served in `weights`, as `launch.server` sets them."""
    from kit.core.formats import packed_format
    from kit.rollout.server import packed_config
    from kit.rollout.server.adapter_check import checkpoint_shapes

    if (packed := packed_format(weights)) is None:
        return {"quantization": weights}
    facts = {"quantization": {"type": "none", "storage_dtype": "bfloat16"}, "hash": "", "tensors": {}}
    (folder / "base.json").write_text(json.dumps(facts | {"quantized": list(checkpoint_shapes(folder))}))
    settings = packed_config.quantization_config(packed, folder)
    options = {"load_format": packed_config.LOAD_FORMAT, "worker_extension_cls": packed_config.EXTENSION}
    return options | {"hf_overrides": {"quantization_config": settings}}


def _log_probs(folder: str, ids: list[int]) -> "torch.Tensor":
    """Log-probs (T - 1,) of ids[1:], computed by transformers on the CPU in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]  # (T - 1, V)
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def mapped_memory() -> dict:
    """A tensor of a child process, mapped by this one as `server.share_base` does; the facts hold the device."""
    import subprocess

    import torch

    from kit.weights.shared_memory import attach

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        line, mapped = owner.stdout.readline(), {}
        if not line:
            raise ValueError(f"the process that owns the memory ended with {owner.wait()}")
        mapped = attach(json.loads(line), device)
        if not torch.equal(mapped["x"].cpu(), torch.arange(1000.0)):
            raise ValueError("the mapped memory has other values than its owner's")
        mapped.clear()  # before the owner ends
    finally:
        owner.kill()
        owner.communicate()
    return {"device": str(device)}


def all_reduce(rank: int, world: int, store: str, backend: str, mib: int) -> dict:
    """All-reduce over all processes, checked exactly, with its bus bandwidth in GB/s."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=30)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    count = mib * 2**20 // 4
    # Small integers, so that the sum is exact in any order.
    ours = torch.arange(count, device=device, dtype=torch.float32) % 1000 + rank
    want = torch.arange(count, device=device, dtype=torch.float32) % 1000 * world + sum(range(world))
    dist.all_reduce(ours)
    wrong = int((ours != want).sum())
    if wrong:
        raise ValueError(f"the sum over {world} processes is wrong in {wrong:,} of {count:,} places")
    seconds, rounds = 0.0, 5
    for _ in range(2):  # the first round warms up
        _wait(device)
        started = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(ours)
        _wait(device)
        seconds = (time.perf_counter() - started) / rounds
    # Bus bandwidth over the slowest link, as nccl-tests defines it.
    return {"gb_per_s": round(count * 4 / seconds * 2 * (world - 1) / world / 1e9, 2), "mib": mib}


def hub_head(kind: str, identifier: str, revision: str | None, limit_s: float) -> str:
    """`there` if the hub serves a model or data set, else why not. One HEAD request of at most `limit_s`."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    file = "config.json" if kind == "model" else "README.md"
    url = hf_hub_url(identifier, file, repo_type=kind, revision=revision)
    try:
        get_hf_file_metadata(url, timeout=limit_s)
    except GatedRepoError:
        return "it is gated"
    except RevisionNotFoundError:
        return f"the hub has no revision {revision} of it"
    except RepositoryNotFoundError:
        return "the hub has none of that name, or it is private"
    except EntryNotFoundError:
        return "there" if kind == "dataset" else "it has no config.json"
    except Exception as error:  # no network, an outage, a proxy: each has its own class
        said = (str(error).splitlines() or [""])[0]
        return f"no answer within {limit_s:g} s: {type(error).__name__}: {said}"[:200]
    return "there"


def recipe_checks(config: str, processes: int, directory: str) -> dict:
    """What the recipe rejects about a configuration's model (JSON) and about this machine, resolved from `directory`;
    `skipped` says why nothing was checked. Reads no weights."""
    from kit.core.config.checks import check_config
    from kit.core.config.load import config_from_dict
    from kit.core.errors import BadInput

    os.chdir(directory)
    made = config_from_dict(json.loads(config))
    facts = {"skipped": "", "refused": "", "kind": ""}
    try:
        check_config(made, processes)
    except BadInput:
        return facts | {"skipped": "the check of the config comes first"}
    if not _has_file(made, "config.json"):
        return facts | {"skipped": f"{made.model.source} has no config.json here"}
    try:
        return facts | {"kind": _check_model(made, processes)}
    except BadInput as error:
        return facts | {"refused": str(error)}


def _check_model(config: "Config", processes: int) -> str:
    """Run the recipe's checks between reading the configuration and loading the base; return the model type."""
    from kit.policy import gpu_memory, layer_kernels
    from kit.policy.load import load_tokenizer
    from kit.train import setup
    from kit.train.trainer import check_card

    model_config = setup.check_model(config)
    setup.resolve_recompute(config, model_config, processes)
    if _has_file(config, "tokenizer_config.json"):
        load_tokenizer(config)
    setup.trained_format(config, model_config)
    check_card(config)
    layer_kernels.check_gpu(config)
    gpu_memory.limit_gpu_memory(config)
    return model_config.model_type


def reward_checks(config: str, processes: int, directory: str) -> dict:
    """What is wrong with the rewards of a configuration (JSON), tried on its data as the recipe does, resolved from
    `directory`; `said` are the lines about them, `skipped` says why nothing was tried."""
    from kit.core.config.checks import check_config
    from kit.core.config.load import config_from_dict
    from kit.core.errors import BadInput

    os.chdir(directory)
    made = config_from_dict(json.loads(config))
    facts = {"skipped": "", "refused": "", "said": []}
    try:
        check_config(made, processes)
    except BadInput:
        return facts | {"skipped": "the check of the config comes first"}
    if made.sft.is_given:
        return facts | {"skipped": "supervised fine-tuning learns from no reward"}
    if made.data.path is None or not Path(made.data.path).expanduser().exists():
        return facts | {"skipped": "the data is not a file here; the run tries its rewards before it loads the base"}
    try:
        return facts | {"said": _try_rewards(made, processes)}
    except BadInput as error:
        return facts | {"refused": str(error)}


def _try_rewards(config: "Config", processes: int) -> list[str]:
    from kit.core.run_directory import RunDir
    from kit.data.problems import read_problems
    from kit.data.references import try_rewards
    from kit.train.setup import load_rewards
    from reward import gold_checks

    rewards, weights = load_rewards(config, RunDir(config.run.directory), config.environment.is_given, processes)
    problems, _ = read_problems(config.data, "train", gold_checks(config.reward.functions))
    return try_rewards(config, rewards, weights, problems)


def _has_file(config: "Config", name: str) -> bool:
    """Whether a file of the model is on this machine; a hub model may be partly cached."""
    from huggingface_hub import try_to_load_from_cache

    model = config.model
    if model.path is not None:
        return (Path(model.path) / name).is_file()
    return isinstance(try_to_load_from_cache(model.id, name, revision=model.revision), str)


def _wait(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _die_with_parent() -> None:
    """End this process and its children when the other end of stdin closes: the doctor is gone."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def main(descriptor: int, steps: list[list]) -> None:
    """Run the steps, then exit without Python's clean-up, in which vLLM occasionally hangs."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.set_inheritable(descriptor, False)

    def say(**line: Any) -> None:
        os.write(descriptor, (json.dumps(line) + "\n").encode())

    for name, *arguments in steps:
        say(started=name)
        started = time.monotonic()
        try:
            answer = {"facts": globals()[name](*arguments)}
        except BaseException as error:
            import traceback

            traceback.print_exc()
            said = (str(error).strip().splitlines() or [""])[0]
            answer = {"fault": f"{type(error).__name__}: {said}"[:600]}
        say(seconds=round(time.monotonic() - started, 2), **answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
