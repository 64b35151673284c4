"""One case of bench_update.py in a separate process: a model, its update step on every batch, seconds and memory.

The name of a case is its parts joined with +: `stock_bf16` or `stock_nf4` (TRL's path: peft, transformers' full
recomputation), `plain` (the latter with the kit's FP32 adapter), `unsloth`, or levers of the kit (workload.py, or
key=value), with everything else as in `full`. The imports run at once; the card is touched only after a line on stdin,
so that a case can get ready during the previous one.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from workload import CONFIG, LEVERS, PEAK_FLOPS, TARGETS, update_flops

WARM_UP, STEPS, RANK, ALPHA, BRANCHES = 2, 3, 16, 32, 0.1
STOCK = ("stock_bf16", "stock_nf4")
PLAIN = (*STOCK, "plain")
INPUT_PEAK = 16.0  # for formats with static input ranges


@dataclass(frozen=True)
class Batch:
    """`rows` of `length` tokens; in a ragged batch that is the longest. The first eighth of the tokens is a prompt
    shared by a group of 8."""

    rows: int
    length: int
    is_ragged: bool

    @classmethod
    def parse(cls, text: str) -> "Batch":
        """Parse 8x2048 or 8x2048r."""
        rows, _, length = text.removesuffix("r").partition("x")
        return cls(int(rows), int(length), text.endswith("r"))

    @property
    def prompt(self) -> int:
        return self.length // 8

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row: all, or from a third of the completion to all of it."""
        longest = self.length - self.prompt
        shares = [1 - 2 / 3 * row / max(1, self.rows - 1) if self.is_ragged else 1 for row in range(self.rows)]
        return [self.prompt + max(1, round(longest * share)) for share in shares]

    def tensors(self, device: str) -> tuple[Any, Any]:
        """Token ids and attention mask, (rows, length)."""
        import torch

        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 250, (self.rows, self.length), generator=draw)
        for row in range(self.rows):
            ids[row, : self.prompt] = ids[row - row % 8, : self.prompt]
        mask = torch.arange(self.length)[None] < torch.tensor(self.lengths)[:, None]
        return ids.to(device), mask.long().to(device)


class Case:
    """A built model and its training step."""

    def __init__(self, name: str, targets: str, work: Path, device: str):
        import torch

        from kit.policy.packed import sequence_parallel

        self.name, self.targets, self.work, self.device = name, targets, work, device
        self.levers = name.split("+")
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        self.config = self.read_config()
        self.model = self.unsloth() if name == "unsloth" else self.build()
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.seed_adapter()
        self.start = {n: p.detach().cpu().clone() for n, p in self.trained.items()}
        self.accelerator = SimpleNamespace(autocast=self.autocast, device=torch.device(device), num_processes=1)
        self.model.train()
        self.group = sequence_parallel.start(self.config.train.sequence_parallel)

    def autocast(self) -> Any:
        """Autocast as accelerate runs a bf16 trainer; no-op on a CPU, where everything is float32."""
        import torch

        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda")

    def read_config(self) -> Any:
        from kit.core.config.load import load_config

        keys = {"model.path": self.work, "policy.lora_rank": RANK, "policy.lora_alpha": ALPHA}
        keys |= {"model.dtype": str(self.dtype).removeprefix("torch."), "policy.target_modules": TARGETS[self.targets]}
        if self.name not in PLAIN:
            keys |= {"train.recompute": "full"}
        for lever in self.levers:
            key, is_key, value = lever.partition("=")
            keys |= {key: value} if is_key else LEVERS.get(lever, {})
        return load_config(CONFIG, [f"--{key}={value}" for key, value in keys.items()])

    def build(self) -> Any:
        """Build base, adapter and levers in the trainer's order."""
        import torch
        from peft import get_peft_model
        from trl.trainer.utils import add_fused_lm_head

        from kit.policy.load import lora_config, set_adapter_dtype

        base = random_bf16(self.config, self.dtype) if self.name == "stock_bf16" else self.nf4()
        add_fused_lm_head(base, outputs=("log_probs", "entropy"))
        model = get_peft_model(base, lora_config(self.config.policy))
        # TRL 1.16 casts the adapter of a 4-bit model to bfloat16; peft casts that of a bfloat16 model to float32.
        set_adapter_dtype(model, str(self.dtype).removeprefix("torch.") if self.name == "stock_nf4" else "float32")
        if self.name not in PLAIN:
            put_on_levers(model, self.config)
        if self.name in PLAIN or self.config.train.recompute != "none":
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return model

    def nf4(self) -> Any:
        from memory_child import random_nf4

        return random_nf4(self.config, BRANCHES)

    def unsloth(self) -> Any:
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            str(self.work), max_seq_length=4096, load_in_4bit=True, dtype=self.dtype, fast_inference=False
        )
        return FastLanguageModel.get_peft_model(
            model,
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=TARGETS[self.targets].strip("[]").split(", "),
            use_gradient_checkpointing="unsloth",
            random_state=0,
        )

    def seed_adapter(self) -> None:
        """Set the same A in every case, and a nonzero B: with zero, A has no gradient."""
        import torch

        for place, (name, parameter) in enumerate(self.trained.items()):
            draw = torch.Generator().manual_seed(place)
            scale = parameter.shape[1] ** -0.5 if "lora_A" in name else 1e-3
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * scale)

    def loss(self, ids: Any, mask: Any, batch: Batch) -> Any:
        """Mean negative log-prob of the completions' real tokens."""
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : batch.prompt] = -100
        if self.name == "unsloth":
            return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        if {"packed", "shared"} & {*self.levers}:
            logps = self.packed(ids, mask, batch)
        else:
            with self.autocast():
                logps = self.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
            logps = logps[:, batch.prompt - 1 :]
        return -logps.float().sum() / (labels != -100).sum()

    def packed(self, ids: Any, mask: Any, batch: Batch) -> Any:
        from kit.policy.packed.packing import make_pack, pack_logps

        data, kind = (ids, mask, batch.length - batch.prompt), self.config.train.packed_attention
        pack = make_pack(self, self.model, *data, "shared" in self.levers, kind, self.group)
        return pack_logps(self, self.model, pack, False, group=self.group)[0]

    def average_gradients(self) -> None:
        """No-op: with one process there is nothing to reduce between backward and optimizer."""

    def optimizer(self) -> Any:
        """The optimizer that transformers builds for train.optimizer."""
        import torch

        if "adamw_8bit" in self.levers:
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit([*self.trained.values()], lr=1e-5)
        is_fused = "adamw_fused" in self.levers or None
        return torch.optim.AdamW([*self.trained.values()], lr=1e-5, weight_decay=0.0, fused=is_fused)

    def measure(self, batch: Batch, profile: bool) -> dict[str, Any]:
        """Seconds and peak memory of a step on one batch, and its first loss and gradient against the plain path."""
        import torch

        cuda = self.device == "cuda"
        for name, value in self.start.items():
            self.trained[name].data.copy_(value)
        ids, mask = batch.tensors(self.device)
        optimizer = self.optimizer()

        def step(after_backward: Any = lambda loss: None) -> float:
            started = time.perf_counter()
            loss = self.loss(ids, mask, batch)
            loss.backward()
            self.average_gradients()
            after_backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - started

        found: dict[str, Any] = {}
        warm = [step(lambda loss: found.update(self.compare(loss, batch)))]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        warm += [step() for _ in range(WARM_UP - 1)]
        seconds = statistics.median([step() for _ in range(STEPS)])
        tokens = sum(batch.lengths)
        flops = sum(n * update_flops(self.model.config.to_dict(), n) for n in batch.lengths)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        found |= {"first_s": warm[0], "step_s": seconds, "tok_s": tokens / seconds, "peak_gib": peak}
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0
        found |= {"tokens": tokens, "mfu": flops / seconds / PEAK_FLOPS}
        if profile:
            from kernel_groups import profile_step

            found["profile"] = profile_step(step, self.model.config, RANK, cuda)
        return found

    def compare(self, loss: Any, batch: Batch) -> dict[str, float]:
        """The loss, and the gradient's norm ratio and cosine to the plain path's; `plain` saves its own."""
        import torch

        gradients = {n: p.grad.detach().float().cpu() for n, p in self.trained.items() if p.grad is not None}
        found = {
            "loss": loss.item(),
            "grad_norm": sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5,
        }
        if self.name in ("unsloth", "stock_bf16") or self.config.policy.quant_cfg is not None:  # another base
            return found
        file = self.work / f"plain-{self.targets}-{batch.rows}x{batch.length}{'r' * batch.is_ragged}.pt"
        if self.name == "plain":
            torch.save({"loss": found["loss"], "gradients": gradients}, file)
            return found
        if not file.is_file():
            return found
        plain = torch.load(file)
        if plain["gradients"].keys() != gradients.keys():
            raise RuntimeError(f"{len(gradients)} adapter tensors have a gradient, {len(plain['gradients'])} in plain")
        pairs = [(gradients[name].double(), other.double()) for name, other in plain["gradients"].items()]
        dot = sum((one * other).sum().item() for one, other in pairs)
        norm = sum(other.square().sum().item() for _, other in pairs) ** 0.5
        worst = min(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0, eps=1e-30).item() for a, b in pairs)
        found |= {"loss_error": abs(found["loss"] / plain["loss"] - 1), "norm_ratio": found["grad_norm"] / norm}
        return found | {"cosine": dot / norm / found["grad_norm"], "worst_cosine": worst}


def put_on_levers(model: Any, config: Any) -> None:
    """Apply the trainer's changes to its model for the keys of LEVERS, in its order; input ranges are placeholders."""
    import torch

    from kit.core.format_names import read_quant_format
    from kit.policy.fused_linear import use_fused_linears
    from kit.policy.fused_mlp import use_fused_mlps
    from kit.policy.layer_kernels import use_kernels
    from kit.policy.packed.attention import use_packed_attention
    from kit.policy.quantized_linear import quantized_layers, use_quantized_linears
    from kit.policy.recompute import use_recompute
    from kit.train.kept_logits import keep_logits

    keep_logits(config.train.keep_logits)
    if config.train.micro_batch_tokens is not None:
        use_packed_attention(model.get_base_model(), is_split=config.train.sequence_parallel > 1)
    if config.policy.compute != "plain":
        use_fused_linears(model, config.policy.compute, config.train.keep_weights)
    if config.policy.quant_cfg is not None:
        fmt = read_quant_format(config.policy.quant_cfg)
        use_quantized_linears(model, fmt)
        for layer in quantized_layers(model).values() if fmt.needs_calibration else ():
            layer.product.input_peak = layer.weight.new_tensor(INPUT_PEAK, dtype=torch.float32)
    use_kernels(model, config)
    use_fused_mlps(model, config)
    use_recompute(model, config)


def random_bf16(config: Any, dtype: Any) -> Any:
    """The same shape with random unquantized weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kit.weights.attention import attention_of

    facts = AutoConfig.from_pretrained(config.model.source)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            facts, dtype=dtype, attn_implementation=attention_of(facts, config.model.attn_implementation)
        )
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(BRANCHES)
    return model


def imports(name: str, work: Path) -> None:
    """Import everything that takes seconds and does not touch the card."""
    if name == "unsloth":
        os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(work / "unsloth"))
        import unsloth  # noqa: F401 (before trl, peft and transformers, as it requires)

        return
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import trl.trainer.utils  # noqa: F401

    import kit.policy.fused_linear
    import kit.policy.packed.attention  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--case", required=True)
    parser.add_argument("--targets", choices=TARGETS, required=True)
    parser.add_argument("--batches", nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True, help="model directory; the plain gradients go there")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    imports(options.case, options.work)
    imported = time.perf_counter() - started
    sys.stdin.readline()
    import torch

    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case(options.case, options.targets, options.work, device)
    print(f"{options.case}: imports {imported:.0f} s, model {time.perf_counter() - started:.0f} s", flush=True)
    for text in options.batches:
        row: dict[str, Any] = {"case": options.case, "targets": options.targets, "batch": text}
        try:
            row |= case.measure(Batch.parse(text), options.profile and text == options.batches[0])
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print("ROW", json.dumps(row), flush=True)
        if device == "cuda":
            case.model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
