"""Supervised fine-tuning: the loss of a step is the cross-entropy of its rows' answers.

    loss = -Σ over the tokens in the loss of log π(token | tokens before it) / number of these tokens in the step

Written for trl 1.16. `SFTTrainer` itself does not fit: its packs need FlashAttention from outside, its adapter of a
4-bit base is trained in bfloat16, and its checkpoints are neither whole nor absent. `PolicyTrainer` has everything but
the loss and the rows: packs by tokens, fused linear layers, recomputation, records, checkpoints that resume exactly.
So this is that trainer with rows from the data where GRPO samples them. A row's tokens before the first one in the
loss take the place of the prompt, the others that of the completion; tokens between two answers are masked like those
that an environment wrote. The log-probs and the top token come from TRL's fused head, in tiles: logits
(tokens, vocabulary) never exist.

Tokens weigh the same over the whole step, over micro-batches and processes, as in transformers with
`num_items_in_batch`.
"""

from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from trl.trainer.utils import RepeatSampler, add_fused_lm_head, pad

from kit.core.config.schema import Config
from kit.core.config.sft_rules import settled
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.policy.adapter_dropout import turned_off
from kit.rollout.policy_view import Rollouts
from kit.train.data_order import skip_passes
from kit.train.loss import LossFunction
from kit.train.loss_scale import KEYS as SCALE_KEYS
from kit.train.rows import loss_mask, take_rows
from kit.train.sampling import row_tensors
from kit.train.step import IDLE, PolicyStep, StepTally
from kit.train.trainer import PolicyTrainer, loss_settings, trainer_arguments

# Keys of GRPO's lines that those of supervised fine-tuning have too.
SHARED: tuple[str, ...] = (
    "step",
    "total_steps",
    "time",
    "loss",
    "grad_norm",
    "learning_rate",
    "update_tokens_per_s",
    "seconds",
)
SHARED += ("peak_gib", *SCALE_KEYS)


def sft_arguments(config: Config, run: RunDir, processes: int) -> Any:
    """TRL's arguments for a checked configuration; raises `BadInput` also for a key of `train.trl` that only GRPO's
    loss reads."""
    from trl import SFTConfig

    for key in config.train.trl:
        if key not in SFTConfig.__dataclass_fields__:
            raise BadInput(f"train.trl.{key} does nothing in supervised fine-tuning. Remove it.")
    return trainer_arguments(settled(config, processes), run)


def not_judged(completions: list, **columns: Any) -> list[None]:
    """TRL's trainer wants a reward; supervised fine-tuning never calls it."""
    return [None] * len(completions)


class SftStep(PolicyStep):
    """The step of supervised fine-tuning: no rewards, no old log-probs, no reference."""

    field = "is_top1"

    def __init__(self, *facts: Any):
        super().__init__(*facts)
        self._sums: torch.Tensor | None = None  # of log-probs, top tokens and tokens since the last report

    def loss_of_rows(
        self, model: torch.nn.Module, rows: dict, step_rows: int, step_tokens: torch.Tensor
    ) -> torch.Tensor:
        logps, is_top = self.score(model, rows)  # (b, C) each
        mask = loss_mask(rows)  # (b, C)
        sums = _sums(logps.detach(), is_top, mask)
        self._sums = sums if self._sums is None else self._sums + sums
        return -(logps * mask).sum() / step_tokens

    def finish(self, tally: StepTally) -> None:
        """Log the step's share of tokens that the model ranks first, over all processes."""
        _, top, tokens = self.accelerator.reduce(self._sums, "sum").tolist()
        self._sums = None
        self.metrics["token_accuracy"].append(top / max(tokens, 1.0))

    def measure(self, batch: dict) -> torch.Tensor:
        """Sums (3,) of log-probs, top tokens and tokens of this process's rows, without gradients and dropout."""
        size = self.arguments.per_device_train_batch_size
        plan = torch.arange(len(batch["completion_ids"])).split(size)
        if self.config.train.micro_batch_tokens is not None:
            plan = self.plan(batch)
        sums = torch.zeros(3, device=batch["completion_ids"].device)
        model = self.policy.model
        with torch.no_grad(), self.policy.not_checkpointed(model), turned_off(self.dropouts):
            for part in [take_rows(batch, rows) for rows in plan] + self._idle_parts(batch, plan):
                logps, is_top = self._logps(model, part, compute_entropy=True)
                if IDLE not in part:
                    sums += _sums(logps, is_top, loss_mask(part))
        return sums


def _sums(logps: torch.Tensor, is_top: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(3,) log-probs, top tokens and tokens, over the mask (b, C)."""
    return torch.stack([(logps * mask).sum().float(), (is_top * mask).sum().float(), mask.sum().float()])


class SftTrainer(PolicyTrainer):
    """`PolicyTrainer` on rows of the data; also records `token_accuracy`, `heldout_loss` and `heldout_token_accuracy`.

    `heldout_rows` are measured every `watch.eval_every` steps, before the step's update.
    """

    policy_step: SftStep

    def __init__(self, *, config: Config, processes: int, heldout_rows: Dataset | None = None, **kwargs: Any):
        super().__init__(config=settled(config, processes), **kwargs)
        self.heldout_rows, self.every = heldout_rows, config.watch.eval_every
        add_fused_lm_head(self.model.get_base_model(), outputs=("log_probs", "is_top1"))

    def _make_step(self, loss: LossFunction | None) -> SftStep:
        facts = self.config, self.run, self.policy, self.args, loss_settings(self.args, self.config), None
        return SftStep(*facts, self.figures, self._metrics["train"])

    def _get_train_sampler(self, dataset: Dataset | None = None) -> torch.utils.data.Sampler:
        """TRL's sampler with every row once in a pass, where GRPO's repeats a prompt for its group."""
        sampler = RepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=1,
            batch_size=self.args.generation_batch_size,
            repeat_count=self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )
        skip_passes(sampler, self.passes)
        return sampler

    def sample(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """The rows of a step as inputs of the loss, after the held-out rows if they are due."""
        step, accelerator = self.state.global_step + 1, self.accelerator
        names = gather_object([row["problem_id"] for row in rows])
        if self.recorder:
            self.recorder.ledger(step, names)
        if self.heldout_rows is not None and (step == 1 or step % self.every == 0):
            with self.figures.timed("heldout"):
                self._measure_heldout()
            self.figures.note_peak("heldout")
        batch = self.tensors(rows)
        batch["num_items_in_batch"] = accelerator.gather(loss_mask(batch).sum()).sum()
        counted = torch.stack([batch["num_items_in_batch"], accelerator.gather(_tokens(batch)).sum()])
        learned, tokens = counted.tolist()
        self.figures.counts["tokens"] += tokens
        self.figures.values["loss_tokens"] = int(learned)
        self.state.num_input_tokens_seen += tokens
        return batch

    def tensors(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Rows of the data set as a batch: prompts (B, P), completions and what is in the loss (B, C)."""
        made = Rollouts([row["completion_ids"] for row in rows], None, self.state.global_step)
        padding = self._tokenizer.pad_token_id, self.pad_to_multiple_of, self.accelerator.device
        batch = row_tensors([row["prompt_ids"] for row in rows], made, [], *padding)
        learned = [torch.tensor(row["learned"]) for row in rows]
        mask = pad(learned, padding_value=0, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)
        return batch | {"sampled_mask": mask.to(self.accelerator.device)}

    def _measure_heldout(self) -> None:
        """Record the cross-entropy and the share of top tokens on the held-out rows, each process its part."""
        mine = list(self.heldout_rows)[self.accelerator.process_index :: self.accelerator.num_processes]
        sums = torch.zeros(3, device=self.accelerator.device)
        size = max(1, self.args.per_device_train_batch_size)
        for start in range(0, len(mine), size):
            sums += self.policy_step.measure(self.tensors(mine[start : start + size]))
        total, top, tokens = self.accelerator.reduce(sums, "sum").tolist()
        found = {"heldout_loss": -total / tokens, "heldout_token_accuracy": top / tokens}
        self.figures.values |= found
        for key, value in found.items():  # for the trackers
            self._metrics["train"][key].append(value)

    def _record(self, logs: dict, step: int) -> dict:
        found, values = super()._record(logs, step), self.figures.values
        record: dict = {key: found[key] for key in SHARED} | {"token_accuracy": logs.get("token_accuracy")}
        return record | {key: values.get(key) for key in ("loss_tokens", "heldout_loss", "heldout_token_accuracy")}


def _tokens(batch: dict) -> torch.Tensor:
    return batch["prompt_mask"].sum() + batch["completion_mask"].sum()
