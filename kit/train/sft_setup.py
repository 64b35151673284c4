"""Checks and data of supervised fine-tuning before any weight is loaded (recipes/sft_qlora.py)."""

from typing import Any

from kit.core.chat import model_stop_tokens
from kit.core.config.base_rules import describe_base
from kit.core.config.schema import Config
from kit.core.config.sft_rules import rows_a_step
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.data.demonstrations import read_demonstrations
from kit.train.setup import Task, check_model, describe_adapter_type, resolve_recompute, say
from kit.train.sft_rows import to_dataset, token_rows


def read_task(config: Config, run: RunDir, processes: int, dry_run: bool) -> tuple[Task, Any]:
    """Model and rows of a run, and the held-out rows (None without `watch.eval_every`); raises `BadInput` for what
    cannot be trained.

    Resolves `train.recompute: auto` in `config`.
    """
    from kit.policy.load import load_tokenizer
    from kit.train.data_order import check_problems
    from kit.train.sft_trainer import not_judged

    model_config = check_model(config, dry_run)
    resolve_recompute(config, model_config, processes)
    tokenizer = load_tokenizer(config)
    dataset = load_rows(config, tokenizer, "train")
    if len(dataset) < (needed := rows_a_step(config, processes)):
        raise BadInput(
            f"a step needs {needed} rows and {len(dataset)} are left. Lower train.per_device_train_batch_size or "
            "train.gradient_accumulation_steps, or add rows."
        )
    check_problems(run, dataset)
    heldout = None
    if config.watch.eval_every:
        rows = load_rows(config, tokenizer, "eval")
        heldout = rows.select(range(min(len(rows), config.watch.eval_problems)))
    # trl's trainer takes no empty list of rewards.
    return Task(model_config, None, tokenizer, [], [1.0], dataset, None, None, [not_judged]), heldout


def load_rows(config: Config, tokenizer: Any, split: str) -> Any:
    """The rows of a split as token ids; prints what was read, dropped and is in the loss."""
    model, data = config.model, config.data
    stops = set(model_stop_tokens(model.source, tokenizer, data.chat_template_kwargs, model.revision))
    rows, report = read_demonstrations(data, config.sft.rows, split)
    kept, long, unclear = token_rows(rows, tokenizer, stops, config, split)
    learned = sum(sum(row.learned) for _, row in kept)
    tokens = sum(len(row.prompt_ids) + len(row.completion_ids) for _, row in kept)
    name = "training rows" if split == "train" else "held-out rows"
    say(
        f"{name}: {report}, {long:,} too long, {unclear:,} without a clear answer, {len(kept):,} used; "
        f"{learned:,} of {tokens:,} tokens in the loss"
    )
    return to_dataset(kept)


def describe_plan(config: Config, rows: int, processes: int) -> str:
    """What the run would do, in a few lines."""
    train, policy, step = config.train, config.policy, rows_a_step(config, processes)
    shown = "all tokens" if config.sft.learns_all else "answers"
    return "\n".join(
        [
            f"run       {config.run.name} -> {config.run.directory}",
            f"base      {describe_base(config)}",
            f"adapter   LoRA rank {policy.lora_rank}, alpha {policy.lora_alpha}, {policy.adapter_dtype}, on "
            f"{policy.target_modules}, from {policy.init_adapter or 'zero'}",
            *describe_adapter_type(config),
            f"step      {step} rows, {train.max_steps} steps over {rows:,} rows "
            f"({step * train.max_steps / rows:.2f} passes)",
            f"loss      cross-entropy of {shown}, learning rate {train.learning_rate}",
        ]
    )
