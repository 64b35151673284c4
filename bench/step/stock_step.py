"""Whole steps of stock TRL against a stock vLLM server, timed by phase; one line "ROW {json}" per step.

GRPOTrainer of trl 1.16 as its documentation sets it up for LoRA: BF16 base, rank 16 on all linear layers, server mode,
gradient checkpointing (`--recompute none`: without), micro-batch of one group (`--micro`). With `--colocate`, under a
launcher of several processes, each process trains and has vLLM on its own card, TRL's `vllm_mode="colocate"`, in a
share of its memory (`--share`), and samples its part of the step's lengths (bench_lengths.py). Seconds are those of
the first process, by wrapping TRL's own methods; a step ends where the next begins. On a CPU (`--rehearse`) no weights
are sent: that needs NCCL, which vLLM does not support there.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from recipe import pay
from servers import SHARE
from workload import TARGETS, TINY_WORKS, WORKS

seconds: dict[str, float] = defaultdict(float)


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(holder: Any, name: str, phase: Callable[[], str | None]) -> None:
    """Add the seconds of a method to the phase that `phase` returns at call time."""
    method = getattr(holder, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **keys: Any) -> Any:
        label = phase()
        if label is None:
            return method(*args, **keys)
        synchronize()
        started = time.perf_counter()
        try:
            return method(*args, **keys)
        finally:
            synchronize()
            seconds[label] += time.perf_counter() - started

    setattr(holder, name, wrapped)


def watch_phases() -> None:
    """Wrap the parts of a step. `training_step` includes scoring the batch, so the update is the remainder."""
    import torch
    import trl.trainer.grpo_trainer as module

    timed(module.VLLMGeneration, "sync_weights", lambda: "sync")
    timed(module.VLLMGeneration, "generate", lambda: "generate")
    timed(module.GRPOTrainer, "_generate_and_score_completions", lambda: "score")
    timed(module.GRPOTrainer, "training_step", lambda: "training_step")
    # With gradients, it is the update's own forward.
    extra = "_get_per_token_logps_and_entropies"
    timed(module.GRPOTrainer, extra, lambda: None if torch.is_grad_enabled() else "logps")
    generate = module.VLLMGeneration.generate

    def counted(*args: Any, **keys: Any) -> Any:
        output = generate(*args, **keys)
        seconds["completion_tokens"] += sum(map(len, output[1]))
        seconds["prompt_tokens"] += sum(map(len, output[0]))
        return output

    module.VLLMGeneration.generate = counted


def send_nothing() -> None:
    """Leave vLLM with its current weights."""
    import trl.trainer.grpo_trainer as module
    from trl.generation.vllm_client import VLLMClient

    for holder, name in ((VLLMClient, "init_communicator"), (module.VLLMGeneration, "sync_weights")):
        setattr(holder, name, lambda *args, **keys: None)


def recorder() -> Any:
    """A callback that prints a row at the end of every step."""
    import torch
    from transformers import TrainerCallback

    class Record(TrainerCallback):
        """Tokens are summed over all processes; seconds are those of the first."""

        ended = time.perf_counter()

        def on_pre_optimizer_step(self, *args: Any, **keys: Any) -> None:
            synchronize()
            self.optimizer_from = time.perf_counter()

        def on_optimizer_step(self, *args: Any, **keys: Any) -> None:
            synchronize()
            seconds["optimizer"] += time.perf_counter() - self.optimizer_from

        def on_step_end(self, args: Any, state: Any, *others: Any, **keys: Any) -> None:
            synchronize()
            now = time.perf_counter()
            found = {name: round(value, 3) for name, value in seconds.items()}
            if args.world_size > 1:
                names = ("completion_tokens", "prompt_tokens")
                counts = torch.tensor([found[name] for name in names], dtype=torch.float64, device=args.device)
                torch.distributed.all_reduce(counts)
                found |= dict(zip(names, counts.tolist(), strict=True))
            cuda = torch.cuda.is_available()
            found |= {"number": state.global_step, "step": round(now - self.ended, 3)}
            found["update"] = found["training_step"] - found["score"] + found["optimizer"]
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            if state.is_world_process_zero:
                print(f"ROW {json.dumps(found)}", flush=True)
            self.ended = now
            seconds.clear()

    return Record()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--url", help="the stock server")
    parser.add_argument("--colocate", action="store_true", help="no server: vLLM in every process")
    parser.add_argument("--share", type=float, default=SHARE, help="of the card, for vLLM in every process")
    parser.add_argument("--micro", type=int, help="completions of a micro-batch; one group by default")
    parser.add_argument("--load", choices=WORKS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--recompute", choices=("full", "none"), default="full", help="none: no checkpointing")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    load = (TINY_WORKS if options.rehearse else WORKS)[options.load]

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    if options.rehearse:
        send_nothing()
    watch_phases()
    rows = [json.loads(line) for line in (options.model / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["question"]}]} for row in rows])
    processes, micro = int(os.environ.get("WORLD_SIZE", "1")), options.micro or load.group
    if options.colocate:
        sampler = {"vllm_mode": "colocate", "vllm_max_model_length": load.prompt + load.longest + 1}
        sampler["vllm_gpu_memory_utilization"] = options.share
        # Read by the plugin, which vLLM loads when TRL makes its engine.
        os.environ["BENCH_LENGTHS_PART"] = f"{os.environ.get('RANK', '0')}/{processes}"
    else:
        sampler = {"vllm_mode": "server", "vllm_server_base_url": options.url, "vllm_server_timeout": 120}
    arguments = GRPOConfig(
        output_dir=str(options.model.parent / "stock-output"),
        use_vllm=True,
        **sampler,
        num_generations=load.group,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=load.completions // micro // processes,
        max_completion_length=load.longest,
        beta=0.01,
        learning_rate=1e-5,
        gradient_checkpointing=options.recompute == "full",
        bf16=not options.rehearse,
        use_cpu=options.rehearse,
        ddp_find_unused_parameters=False,  # there are none; the default searches for them in every step
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={
            "dtype": torch.float32 if options.rehearse else torch.bfloat16,
            "attn_implementation": "sdpa",
        },
    )
    layers = TARGETS["all"].strip("[]").split(", ")
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=[pay],
        args=arguments,
        train_dataset=data,
        peft_config=LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules=layers),
    )
    trainer.add_callback(recorder())
    trainer.train()


if __name__ == "__main__":
    main()
