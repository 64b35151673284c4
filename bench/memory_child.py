"""Trainer points of one shape in a process of their own, for memory_points.py: the recipe itself with random weights.

`recipes/grpo_qlora.py` runs as a user starts it, except that its base is random NF4 generated on the card (nothing is
on disk, so 32B shapes fit), its sampler is a stub that answers with random tokens of exactly the wanted length, its
rewards are random numbers, and the base is not hashed and no checkpoint written. The log-prob and reference passes,
the loss, the backward pass and the optimizer are the trainer's own.
"""

import argparse
import gc
import json
import math
import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
CONTEXT, STEPS = 4096, 2
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


def _shape(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    found = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return found | {"num_attention_heads": heads, **COMMON, "tie_word_embeddings": tied}


SHAPES = {  # Qwen3 shapes; tiny is for rehearsing on a CPU
    "tiny": _shape(64, 256, 2, 4, False) | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 400},
    "0.6b": _shape(1024, 3072, 28, 16, True),
    "1.7b": _shape(2048, 6144, 28, 16, True),
    "4b": _shape(2560, 9728, 36, 32, True),
    "8b": _shape(4096, 12288, 36, 32, False),
    "14b": _shape(5120, 17408, 40, 40, False),
    "32b": _shape(5120, 25600, 64, 64, False),
}


def make_directory(directory: Path, shape: str, prompt_tokens: int, problems: int = 128) -> None:
    """Write a model directory without weights: config, tokenizer, and problems with prompts of `prompt_tokens`."""
    from transformers import GenerationConfig, Qwen3Config

    from recipes.tiny_base import make_problems, make_tokenizer

    rng = random.Random(0)
    tokenizer = make_tokenizer(make_problems(2000, False, 100, rng), rng, CONTEXT)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    facts = {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "max_position_embeddings": CONTEXT}
    Qwen3Config(**SHAPES[shape], **facts, **ids).save_pretrained(directory)
    GenerationConfig(**ids).save_pretrained(directory)
    tokenizer.save_pretrained(directory)

    def length(question: str) -> int:
        messages = [{"role": "user", "content": question}]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])

    rows = []
    for _ in range(problems + 8):
        digits = "".join(rng.choices("123456789", k=prompt_tokens - length("")))  # one token each
        rows.append(json.dumps({"question": digits, "answer": "1"}))
    if (found := length(json.loads(rows[0])["question"])) != prompt_tokens:
        raise SystemExit(f"the prompts have {found} tokens, {prompt_tokens} were wanted")
    (directory / "train.jsonl").write_text("\n".join(rows[:problems]) + "\n")
    (directory / "heldout.jsonl").write_text("\n".join(rows[problems:]) + "\n")


def make_checkpoint(directory: Path) -> None:
    """Write random weights into a directory of `make_directory`, for steps that need them on disk."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    model.save_pretrained(directory)


def parameters(shape: str) -> int:
    """Number of weights of a shape, with tied ones counted once."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape])).parameters())


def random_nf4(config: Any, branches: float = 1.0) -> Any:
    """Replacement for `kit.policy.load.load_policy_base` with random weights and no file: every linear layer but the
    output embedding is NF4, by transformers' own steps around loading. `branches` scales what attention and MLP add to
    the residual stream."""
    import torch
    from accelerate import PartialState
    from bitsandbytes.nn import Params4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    from kit.policy.host_embedding import keep_embedding_on_host
    from kit.weights.attention import attention_of
    from kit.weights.experts import experts_of, frozen_experts
    from kit.weights.frozen_base import disable_cpu_repacking, unquantized_config
    from kit.weights.layout import PARTS
    from kit.weights.model_files import without_weights

    dtype, device = getattr(torch, config.model.dtype), PartialState().device
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.policy.double_quantization,
        bnb_4bit_compute_dtype=dtype,
    )
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    facts = unquantized_config(config.model.source)
    attention = attention_of(facts, config.model.attn_implementation)
    with torch.device("meta"), frozen_experts(without_weights(facts)):
        model = AutoModelForCausalLM.from_config(facts, dtype=dtype, attn_implementation=attention)
    quantizer.preprocess_model(model=model, device_map={"": device}, dtype=dtype)
    model.hf_quantizer = quantizer
    for path, module in model.named_modules():
        std = 0.02 * (branches if path.endswith(("o_proj", "down_proj")) else 1)
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            value = value.normal_(std=std) if value.ndim > 1 else value.fill_(1)
            if isinstance(parameter, Params4bit):
                made = Params4bit(value, requires_grad=False, **parameter.__dict__).to(device)
            else:
                made = torch.nn.Parameter(value)
            setattr(module, name, made)
    for module in experts_of(model).values():
        for name, (experts, out, columns) in module.shapes.items():
            count, rows = experts * PARTS[name], out // PARTS[name]
            std = 0.02 * (branches if name == "down_proj" else 1)
            matrices = (torch.empty(rows, columns, dtype=dtype, device=device).normal_(std=std) for _ in range(count))
            module.store(name, matrices, "nf4", dtype, device, config.policy.double_quantization)
    model.tie_weights()
    # Its frequencies are a buffer that is in no checkpoint.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    quantizer.postprocess_model(model)
    disable_cpu_repacking(model)
    if config.policy.embeddings == "host":
        keep_embedding_on_host(model)
    return model.eval()


class StubRollout:
    """A sampler that answers at once: as many random tokens as the configuration allows, with log-probs of a uniform
    choice. The trainer treats them like a server's."""

    def __init__(self, config: Any, vocabulary: int):
        self.length = config.rollout.max_completion_length
        self.logp = -math.log(vocabulary)

    def check_base(self, base_hash: str) -> None:
        pass

    def close(self) -> None:
        pass

    def generate(self, policy: Any, prompt_ids: list, group: int | None = None) -> Any:
        from kit.rollout.policy_view import Rollouts

        ids = [[random.randrange(3, 250) for _ in range(self.length)] for _ in prompt_ids]
        return Rollouts(ids, [[self.logp] * self.length for _ in prompt_ids], policy.version)


def random_reward(completions: list, **columns: Any) -> list[float]:
    return [random.random() for _ in completions]


def replace_parts() -> None:
    """Install the stand-ins where the recipe's main() imports its parts from."""
    import kit.core.run_directory
    import kit.policy.load
    import kit.train.setup
    import kit.train.trainer
    import reward

    def make_rollout(config: Any, tokenizer: Any, model_config: Any, run: Any, episodes: Any) -> StubRollout | None:
        return StubRollout(config, model_config.vocab_size) if config.rollout.backend == "server" else None

    kit.train.setup.make_rollout = make_rollout
    kit.policy.load.load_policy_base = random_nf4
    kit.policy.load.record_base = lambda *args, **keys: {"hash": "0" * 64}
    kit.policy.load.check_base_unchanged = lambda *args, **keys: None
    kit.train.trainer.PolicyTrainer._save_checkpoint = lambda *args, **keys: None
    kit.core.run_directory.RunDir.newest_adapter = lambda run: None
    reward.reward_functions = lambda *args, **keys: ([random_reward], [1.0])


def card_used_gib() -> float | None:
    """Memory in use on the card by all processes, without creating a CUDA context; None without a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        index = int((os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0])
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used / 2**30
    except Exception:
        used = nvidia_smi("memory.used", ",nounits")
        return float(used) / 1024 if used else None  # reported in MiB


def nvidia_smi(fields: str, form: str = "") -> str | None:
    """nvidia-smi's answer for the first GPU; None if there is none."""
    query = ["nvidia-smi", f"--query-gpu={fields}", f"--format=csv,noheader{form}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def recompute_of(point: dict[str, Any]) -> str:
    """`train.recompute` of a point; older points have gradient_checkpointing instead, true or false."""
    from kit.plan.compare_points import recompute_of

    return recompute_of(point)


def setting(point: dict[str, Any]) -> list:
    """Key that identifies a point by its setting."""
    names = ("kind", "shape", "micro_batch", "prompt_tokens", "completion_tokens", "beta", "lora_rank")
    names += ("adapter_dtype", "backend", "weights", "sync", "kv_cache_gib", "max_num_seqs", "enforce_eager")
    found = [point.get(name) for name in (*names, "micro_batch_tokens")]
    switches = {"compute": "plain", "kernels": "torch", "recompute_fraction": 1.0, "recompute_offload": False}
    switches |= {"embeddings": "gpu"}
    return [*found, recompute_of(point), *(point.get(name, default) for name, default in switches.items())]


def add_point(file: Path, point: dict[str, Any]) -> None:
    """Add a point to the file, replacing an earlier one with the same setting."""
    from kit.core.run_directory import write_json
    from kit.core.run_files import read_json

    found = read_json(file)
    found["points"] = [one for one in found["points"] if setting(one) != setting(point)] + [point]
    write_json(file, found)


def flags(work: Path, point: dict[str, Any], device: str) -> list[str]:
    """Command line of the recipe for a point."""
    micro = point["micro_batch"]
    keys: dict[str, Any] = {"run.name": "points", "run.output_dir": work / f"run-{time.time_ns()}"}
    keys |= {"model.path": work / point["shape"], "data.path": work / point["shape"]}
    keys |= {"model.dtype": "float32" if device == "cpu" else "bfloat16", "policy.lora_rank": point["lora_rank"]}
    keys |= {"policy.adapter_dtype": point["adapter_dtype"], "rollout.backend": point["backend"]}
    keys |= {"rollout.group_size": 4, "rollout.max_prompt_length": point["prompt_tokens"]}
    keys |= {"rollout.max_completion_length": point["completion_tokens"], "rollout.max_sampler_k3": 1e9}
    keys |= {"train.per_device_train_batch_size": micro, "train.max_steps": STEPS, "train.save_steps": STEPS}
    # At least two micro-batches, so that the second runs with the gradients of the first in memory.
    keys |= {"train.gradient_accumulation_steps": point["completions"] // micro, "train.beta": point["beta"]}
    keys |= {"train.recompute": recompute_of(point)}
    groups = {
        "policy": ("compute", "kernels", "embeddings"),
        "train": ("recompute_fraction", "recompute_offload", "micro_batch_tokens"),
    }
    keys |= {
        f"{group}.{name}": json.dumps(point[name]).strip('"')
        for group, names in groups.items()
        for name in names
        if name in point
    }
    keys |= {"train.learning_rate": 1e-5, "watch.completions_every": 0}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items())]


def measure(work: Path, point: dict[str, Any], before_gib: float | None) -> None:
    """Run two steps and add the second's figures to `point`."""
    import torch

    from recipes.grpo_qlora import main

    cuda = torch.cuda.is_available()
    sys.argv = ["recipes/grpo_qlora.py", *flags(work, point, "cuda" if cuda else "cpu")]
    main()
    run = Path(next(word for word in sys.argv if word.startswith("--run.output_dir=")).split("=", 1)[1])
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    point["peak_gib"] = last["peak_gib"]["update"]
    point["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30 if cuda else None
    used = card_used_gib()
    known = cuda and used is not None and before_gib is not None
    point["context_gib"] = used - before_gib - torch.cuda.memory_reserved() / 2**30 if known else None
    seconds = last["seconds"]["update"] + last["seconds"].get("reference", 0.0)  # as the plan estimates it
    point |= {"update_s": seconds, "update_tokens_per_s": last["update_tokens_per_s"]}
    point |= {"step_s": last["seconds"]["step"]}
    if point["backend"] == "in_process":
        point |= {"rollout_peak_gib": last["peak_gib"]["rollout"], "rollout_s": last["seconds"]["rollout"]}
        point |= {"rollout_tokens_per_s": last["rollout_tokens_per_s"]}


def measure_shape(work: Path, points: list[dict[str, Any]], out: Path) -> None:
    """Measure every point of one shape; a failed one gets its error instead of figures. Waits for a line on stdin,
    the time at which to stop, before it touches the card."""
    import torch

    import kit.train.trainer  # noqa: F401 (imports trl, peft, bitsandbytes while another process uses the card)

    replace_parts()
    deadline = float(sys.stdin.readline())
    touched = torch.cuda.is_available() and torch._C._cuda_hasPrimaryContext(0)
    before_gib = None if touched else card_used_gib()
    for point in points:
        if time.time() > deadline:
            print(f"no time left for {point}", flush=True)
            return
        try:
            if (left := torch.cuda.memory_allocated() / 2**30) > 0.1:
                raise SystemExit(f"{left:.2f} GiB of an earlier point were not freed")
            make_directory(work / point["shape"], point["shape"], point["prompt_tokens"])
            point["params"] = parameters(point["shape"])
            measure(work, point, before_gib)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            point["error"] = f"{type(error).__name__}: {error}"[:300]
        add_point(out, point)
        print("POINT", json.dumps(point), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("what", choices=("trainer", "checkpoint"))
    parser.add_argument("--work", type=Path, required=True, help="a scratch directory; for checkpoint the model's")
    parser.add_argument("--points", type=json.loads, default=[], help="the points as JSON, without figures")
    parser.add_argument("--out", type=Path, help="the file that memory_points.py began")
    options = parser.parse_args()
    if options.what == "checkpoint":
        return make_checkpoint(options.work)
    measure_shape(options.work, options.points, options.out)


if __name__ == "__main__":
    main()
