"""The loss of an optimizer step: in micro-batches of real tokens, and with no forward pass over the batch for what the
update's own forward gives.

Written for trl 1.16 and transformers 5.17 to 5.23; `tests/unit/test_trl_seams.py` holds what is relied on. The loss of
some rows stays TRL's `_compute_loss`, the step around it transformers' `training_step`.

- Old log-probs, the importance ratio against the sampler's and the figures of `mismatch.measure` come from the first
  forward that the update makes over a row. The policy has not moved by then, so it is what TRL's own pass would give.
- With `train.micro_batch_tokens` a process gets all rows of its step at once (`trainer.trainer_arguments`), and their
  loss is the sum of the losses of micro-batches, weighted. The reference goes through the same packs, so that a policy
  that has not moved has a KL of exactly 0: Adam would make steps of what rounding alone leaves of the gradient.
- A padded row's positions count from its first real token, as the sampler's and a pack's do. TRL passes none, so they
  would count from the padding, and rotary embeddings in BF16 are not the same for shifted positions.
- TRL's metrics are those of all rows of the step, not the mean over its accumulation steps.
- A group in which all completions got one reward has advantages of exactly 0.
- The adapter's dropout is on in the forward for the loss only (`adapter_dropout.py`).
"""

import contextlib
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing

from kit.core.config.trl_rules import WHOLE_BATCH_FIELDS
from kit.core.errors import CheckFailed
from kit.policy.adapter_dropout import SEED, adapter_dropouts, seed_of, seeded, turned_off
from kit.policy.packed.packing import packed_logps, plan_micro_batches
from kit.train.mismatch import importance_ratio, measure
from kit.train.trackers import send_figures

# What the first forward leaves with the rows, by TRL's names.
FROM_FORWARD = ("old_per_token_logps", "importance_sampling_ratio", "ref_per_token_logps")


class Unheard:
    """An accelerator whose processes say nothing to each other: for TRL's metrics of one micro-batch, which nobody
    reads. So processes may have different numbers of micro-batches, and the host does not wait for the device."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def reduce(self, tensor: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return torch.zeros(tensor.shape)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1)


class PackedUpdate:
    """Stands before `GRPOTrainer` among the bases of `trainer.PolicyTrainer`, whose attributes it uses."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._dropouts = adapter_dropouts(self.model)
        self._rows: dict | None = None  # whose loss TRL is computing
        self._scores: tuple = ()  # log-probs and entropies (b, C) of the last forward for a loss
        self._whole: tuple | None = None  # those of all rows, for TRL to compute from instead of a forward
        self._slices: list[tuple] = []  # rows, log-probs and entropies of the step's accumulation steps
        self._compared: list[tuple] = []  # policy, sampler and mask (b, C) of the step's rows
        self._rewards: torch.Tensor | None = None  # (all processes' B*G, functions) of the last rollouts

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        correction, iterations, beta = self.vllm_importance_sampling_correction, self.num_iterations, self.beta
        # By these TRL decides whether it passes over the batch for old log-probs and for the reference's.
        self.vllm_importance_sampling_correction, self.num_iterations = False, 1
        if self.config.train.micro_batch_tokens is not None:
            self.beta = 0.0
        try:
            with turned_off(self._dropouts):
                output = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction, self.num_iterations = correction, iterations
            self.beta = beta
        self._drop_flat_groups(output)
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _drop_flat_groups(self, output: dict) -> None:
        """Put the advantages of groups with one reward to 0, and count these groups.

        TRL subtracts a mean from them that is off by a rounding (eight times 0.7), and Adam makes whole steps of what
        is left; it counts them by a deviation that this rounding, or one deviation for the batch, hides."""
        weights = self.reward_weights.to(self._rewards.device)
        rewards, weights = self._rewards[:, weights != 0], weights[weights != 0]  # others are only measured
        unknown = rewards.isnan().any(dim=1, keepdim=True)
        if self.multi_objective_aggregation == "sum_then_normalize":
            rewards = (rewards * weights).sum(dim=1, keepdim=True)
        low, high = (
            rewards.masked_fill(unknown, end).view(-1, self.num_generations, rewards.size(1))
            for end in (math.inf, -math.inf)
        )
        flat = (low.amin(dim=1) == high.amax(dim=1)).all(dim=1)  # (groups,), without those that have no reward
        self._metrics["train"]["frac_reward_zero_std"][-1] = flat.float().mean().item()
        rows, kept = flat.repeat_interleave(self.num_generations), len(output["advantages"])
        mine = rows[self.accelerator.process_index * kept :][:kept]
        output["advantages"] = output["advantages"].masked_fill(mine, 0.0)
        shown = self._logs["advantages"]
        for place in rows.nonzero().flatten().tolist():
            shown[place - len(rows)] = 0.0

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of a step's rows, or of those of one accumulation step. `CheckFailed` after the step's last forward
        and before its last backward, so before the update, when the sampler is not the policy."""
        if self.config.train.micro_batch_tokens is not None:
            loss = self._loss_in_micro_batches(model, inputs)
        elif self._accumulates:
            with self._unheard():
                loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self._slices.append((inputs, *self._scores))
            if self.accelerator.sync_gradients:
                rows, *scores = zip(*self._slices, strict=True)
                self._slices = []
                self._log_metrics(model, join_rows(rows), *map(torch.cat, scores))
        else:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._judge_sampler()
        return loss

    @property
    def _accumulates(self) -> bool:
        """Whether a step has several accumulation steps, of which TRL's metrics would be plain means. Where its loss
        reads what other processes say (`WHOLE_BATCH_FIELDS`) or is not of the log-probs alone, that is left to TRL."""
        hears = any(getattr(self.args, name) not in unused for name, unused in WHOLE_BATCH_FIELDS.items())
        return self.args.gradient_accumulation_steps > 1 and not (hears or self.aux_loss_enabled)

    def _loss_in_micro_batches(self, model: Any, inputs: dict) -> torch.Tensor:
        """The loss of all rows in `inputs`. Its value is that of all, its gradient that of the last micro-batch: the
        others' is in the parameters already, and transformers calls backward for what is returned."""
        plan, scores, total = self._plan(inputs), [], 0.0
        if self._dropouts:
            seed_of(inputs)
        parts = [take_rows(inputs, rows) for rows in plan]
        for number, part in enumerate(parts if self._dropouts else ()):
            part[SEED] += number
        self._add_reference(parts)
        for number, (rows, part) in enumerate(zip(plan, parts, strict=True), start=1):
            # DDP exchanges the sum of the gradients once, in the last backward.
            with contextlib.nullcontext() if number == len(plan) else self.accelerator.no_sync(model):
                with self._unheard():
                    loss = self._compute_loss(model, part)
                if self.config.train.loss_type != "dapo":  # which divides by the tokens of the whole batch
                    loss = loss * (len(rows) / len(inputs["completion_ids"]))
                if number < len(plan):
                    self.accelerator.backward(loss)
            total += loss.detach()
            scores.append(self._scores)
        order = torch.tensor([row for rows in plan for row in rows]).argsort()
        for key in FROM_FORWARD:
            if key in parts[0]:
                inputs[key] = torch.cat([part[key] for part in parts])[order]
        logps, entropies = (torch.cat(each)[order] for each in zip(*scores, strict=True))
        self._log_metrics(model, inputs, logps, entropies)
        return loss + (total - loss.detach())

    def _add_reference(self, parts: list[dict]) -> None:
        """Leave the reference's log-probs (b, C) with each micro-batch, of the packed row that the policy's forward
        makes of it too. Further updates with the same batch find them there."""
        if self.beta == 0.0 or "ref_per_token_logps" in parts[0]:
            return
        train, model = self.config.train, self.accelerator.unwrap_model(self.model)
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with self.timed("reference"), torch.no_grad(), checkpointing, model.disable_adapter():
            for part in parts:
                ids, mask = (
                    torch.cat([part[f"prompt_{of}"], part[f"completion_{of}"]], dim=1) for of in ("ids", "mask")
                )
                columns, how = part["completion_ids"].size(1), (train.share_prompts, False, train.packed_attention)
                part["ref_per_token_logps"], _ = packed_logps(self, self.model, ids, mask, columns, *how)

    def _plan(self, inputs: dict) -> list[list[int]]:
        """The rows of each micro-batch."""
        prompts = zip(inputs["prompt_ids"].tolist(), inputs["prompt_mask"].sum(dim=1).tolist(), strict=True)
        return plan_micro_batches(
            [tuple(ids[len(ids) - length :]) for ids, length in prompts],  # padded on the left
            inputs["completion_mask"].sum(dim=1).tolist(),
            self.config.train.micro_batch_tokens,
            self.config.train.share_prompts,
        )

    def _log_metrics(self, model: Any, inputs: dict, logps: torch.Tensor, entropies: torch.Tensor) -> None:
        """TRL's metrics of all rows (B, C), over all processes: its loss once more, without a forward."""
        self._whole = logps, entropies, None
        try:
            with torch.no_grad():
                self._compute_loss(model, inputs)
        finally:
            self._whole = None

    @contextlib.contextmanager
    def _unheard(self) -> Iterator[None]:
        """Keep TRL's metrics of the block to itself."""
        accelerator, metrics = self.accelerator, self._metrics
        self.accelerator, self._metrics = Unheard(accelerator), {"train": defaultdict(list)}
        try:
            yield
        finally:
            self.accelerator, self._metrics = accelerator, metrics

    def _compute_loss(self, model: Any, inputs: dict) -> torch.Tensor:
        self._rows = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._rows = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if self._whole is not None:
            return self._whole
        args, train = (model, input_ids, attention_mask, logits_to_keep), self.config.train
        with self._dropping() if self._rows is not None else self.timed("reference"):
            if train.micro_batch_tokens is None:
                logps, entropies, aux = super()._get_per_token_logps_and_entropies(
                    self._with_positions(model), *args[1:], batch_size, compute_entropy, **others
                )
            else:
                packing = train.share_prompts, compute_entropy, train.packed_attention
                logps, entropies = packed_logps(self, *args, *packing)
                aux = None
        if self._rows is not None:
            self._scored(self._rows, logps.detach(), entropies.detach())
        return logps, entropies, aux

    def _with_positions(self, model: Any) -> Callable[..., Any]:
        """`model`, called with the positions of its rows besides what TRL passes."""
        if not takes_positions(self.accelerator.unwrap_model(model)):
            return model
        return lambda **inputs: model(**inputs, position_ids=padded_positions(inputs["attention_mask"]))

    def _dropping(self) -> contextlib.AbstractContextManager:
        """Around a forward for the loss: the same dropout masks at every update with these rows."""
        if not self._dropouts or self._rows is None:
            return contextlib.nullcontext()
        return seeded(seed_of(self._rows), self.accelerator.device)

    def _scored(self, rows: dict, logps: torch.Tensor, entropies: torch.Tensor) -> None:
        """Leave with `rows` what the first forward over them gives. TRL's `_compute_loss`, which called for the
        forward, reads both from there only after it, and so do later updates with the same batch."""
        self._scores = logps, entropies
        if "old_per_token_logps" in rows:
            return
        rows["old_per_token_logps"] = logps
        sampler, mask = rows.get("sampling_per_token_logps"), rows["completion_mask"]
        if sampler is None:
            return
        if self.config.rollout.correction != "none":
            rows["importance_sampling_ratio"] = self._importance_ratio(logps, sampler, mask)
        self._compared.append((logps, sampler, mask))

    def _judge_sampler(self) -> None:
        """Record how far the sampler is from the policy on the step's rows; `CheckFailed` above
        `rollout.max_sampler_k3` or when a sampler's log-prob is not a number. Nothing where none was compared."""
        if not self._compared:
            return
        policy, sampler, mask = (torch.cat(each) for each in zip(*self._compared, strict=True))  # (B, C)
        self._compared = []
        local = torch.stack([policy, sampler, mask.to(policy.dtype)]).transpose(0, 2).contiguous()  # (C, B, 3)
        # Completions are padded per process; percentiles need the tokens of all of them.
        everywhere = self.accelerator.gather(self.accelerator.pad_across_processes(local, dim=0))
        width = len(everywhere) // self.accelerator.num_processes
        rows = torch.cat(everywhere.split(width), dim=1)  # (C, N, 3)
        rollout = self.config.rollout
        floor = self.args.vllm_importance_sampling_clip_min
        figures = measure(*rows.permute(2, 1, 0), rollout.correction, rollout.correction_cap, floor)
        self._sampler |= figures
        self._log_sampler(figures, *rows.permute(2, 1, 0))
        k3, limit, step = figures["sampler_k3"], rollout.max_sampler_k3, self.state.global_step + 1
        if count := figures["sampler_nan_count"]:
            problem = (
                f"{count} log-probs of the sampler are not finite: the weights that it serves are damaged. Restart "
                "the replicas, then continue with --resume."
            )
        elif k3 is not None and not k3 <= limit:
            problem = (
                f"the sampler is not the policy: k3 KL {k3:.4f} a token, limit rollout.max_sampler_k3 {limit}. Serve "
                "the dequantized base of this model (python -m merge base, python -m launch.server)."
            )
            if rollout.overlap and self._rollout_version < self.state.global_step:
                problem += (
                    " With rollout.overlap it also counts what one update changed: if k3 rose from small values, "
                    "start another run from the newest adapter (policy.init_adapter) with a lower "
                    "train.learning_rate or without rollout.overlap."
                )
        else:
            return
        record = self._record({}, step)
        send_figures(self, record)
        if self.recorder:
            self.recorder.step(record)
        raise CheckFailed(f"step {step}: {problem}")

    def _log_sampler(self, figures: dict, policy: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> None:
        """The figures, and what TRL logs of the ratios, for the trackers; tensors (N, T) of all processes."""
        found = {f"sampler/{key.removeprefix('sampler_')}": value for key, value in figures.items()}
        correction = self.config.rollout.correction
        if correction != "none" and mask.any():
            ratio = self._importance_ratio(policy, sampler, mask)
            ratio = ratio if correction.startswith("sequence") else ratio[mask.bool()]
            for name in ("min", "mean", "max"):
                found[f"sampling/importance_sampling_ratio/{name}"] = getattr(ratio, name)().item()
        for key, value in found.items():
            if value is not None:
                self._metrics["train"][key].append(value)

    def _importance_ratio(self, policy: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rollout, floor = self.config.rollout, self.args.vllm_importance_sampling_clip_min
        return importance_ratio(policy, sampler, mask, rollout.correction, rollout.correction_cap, floor)


def takes_positions(policy: Any) -> bool:
    """Whether the model under the adapter takes `position_ids`. Models with ALiBi count by the attention mask."""
    return "position_ids" in inspect.signature(type(policy.get_base_model()).forward).parameters


def padded_positions(mask: torch.Tensor) -> torch.Tensor:
    """Position (B, T) of every token, 0 at a row's first real one; `mask` (B, T) is 0 at padding."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def take_rows(inputs: dict, rows: list[int]) -> dict:
    """Some rows of TRL's dictionary of a batch; what is of the whole batch stays."""
    index = torch.tensor(rows, device=inputs["completion_ids"].device)
    return {key: value[index] if torch.is_tensor(value) and value.ndim else value for key, value in inputs.items()}


def join_rows(parts: Sequence[dict]) -> dict:
    """The batch that accumulation steps were cut from: rows one after the other, what is of the whole batch once."""
    return {
        key: torch.cat([part[key] for part in parts]) if torch.is_tensor(value) and value.ndim else value
        for key, value in parts[0].items()
    }
