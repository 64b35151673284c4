"""The loss of one optimizer step: micro-batch by micro-batch, forward, loss (`loss.py`), backward.

`PolicyTrainer` samples the rows (`sampling.py`) and calls `PolicyStep.loss` with those of a step, or of an
accumulation step; transformers makes the update after the last backward, which it calls on the result of `loss`. With
`train.micro_batch_tokens` a process gets all rows of its step at once; otherwise those of an accumulation step, which
are one micro-batch.

- Old log-probs come from the first forward over a batch, before the policy has moved, so no extra pass is needed. A
  replayed row (`replay.py`) brings those of the step that sampled it, and is not compared with the sampler again.
- The reference runs on the same packs as the policy, so a policy that has not moved has a KL of exactly 0. Otherwise
  Adam would turn the gradient of rounding errors into full-size steps.
- The adapter's dropout is on in the forward for the loss and nowhere else (`adapter_dropout.py`).
- Where every pass waits for all processes (FSDP2, DeepSpeed), a process with fewer micro-batches than another makes
  idle ones: a row of its own once more, whose loss is 0.
- With `train.sequence_parallel` the processes of a group compute the loss of all their rows together.
- With `rollout.stream_groups` the rows come in several batches, the first while the servers generate the others.
- Metrics stay on the device until the end of the step, and cover all its rows over all processes.
- The run stops at the end of a step, before its update, if the sampler is not the policy.

Written for trl 1.16 and transformers 5.17 to 5.23; `tests/unit/test_trl_seams.py` checks the assumptions about them.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from kit.core.config.schema import Config
from kit.core.config.stream_rules import BY_TOKENS
from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from kit.policy.adapter_dropout import SEED, adapter_dropouts, seed_of, seeded
from kit.policy.packed import sequence_parallel
from kit.policy.packed.packing import Pack, make_pack, pack_logps, plan_micro_batches
from kit.policy.routing import Routing
from kit.train.figures import StepFigures
from kit.train.loss import LossFigures, LossFunction, LossInputs, LossSettings, compute_loss, entropy_threshold
from kit.train.mismatch import describe_fault, importance_ratio, measure, routing_figures
from kit.train.own_loss import LossFailed
from kit.train.record import keep_traceback
from kit.train.replay import OLD as REPLAYED
from kit.train.rows import (
    PACK,
    keep_own_scores,
    keep_scores,
    loss_mask,
    padded_logps,
    shared_rows,
    take_rows,
    whole_rows,
)
from kit.train.streaming import LAST
from kit.train.trained_policy import TrainedPolicy
from kit.train.trl_trainer import GRPOConfig

NO_ENTROPY = -1e9  # pads the entropies of processes with fewer tokens
IDLE = "is_idle"  # a micro-batch that keeps this process in step with the others, and teaches nothing


def scale_gradients(model: torch.nn.Module, scale: torch.Tensor) -> None:
    """Multiply the gradients of `model` by a 0-dim tensor, in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def pad_columns(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad (b, C) with zeros on the right to (b, columns)."""
    return torch.nn.functional.pad(values, (0, columns - values.size(1)))


class SamplerIsNotThePolicy(CheckFailed):
    """The step's rows were sampled from another distribution; the step is recorded but its update not made."""


class StepTally:
    """Results of one optimizer step's micro-batches, reduced at its end."""

    def __init__(self) -> None:
        self.figures: LossFigures | None = None
        # Log-probs of policy and sampler and their mask, (b, C) each.
        self.compared: list[tuple[torch.Tensor, ...]] = []

    def add(self, figures: LossFigures) -> None:
        self.figures = figures if self.figures is None else self.figures + figures


class PolicyStep:
    """Loss of the steps of a run. `metrics` takes {TRL's name: [value]} for the trackers; `function` is `train.loss`,
    None for the one of `train.loss_type`."""

    field = "entropy"  # of TRL's head, beside the log-probs

    def __init__(
        self,
        config: Config,
        run: RunDir,
        policy: TrainedPolicy,
        arguments: GRPOConfig,
        settings: LossSettings,
        function: LossFunction | None,
        figures: StepFigures,
        metrics: Mapping[str, list[float]],
    ):
        self.config, self.run, self.policy, self.accelerator = config, run, policy, policy.processes
        self.arguments, self.settings, self.function = arguments, settings, function
        self.figures, self.metrics = figures, metrics
        self.dropouts = adapter_dropouts(policy.model)
        self.group = sequence_parallel.start(config.train.sequence_parallel)
        self.tally = StepTally()

    def loss(self, model: torch.nn.Module, inputs: dict, accumulated: int) -> torch.Tensor:
        """The loss of a step's rows, or of those of one of its `accumulated` parts.

        Raises `CheckFailed` if the sampler is not the policy: after the step's last forward and before its last
        backward, so before the update.
        """
        own = inputs
        if self.group is not None:
            inputs = shared_rows(own, self.group)
        rows = len(inputs["completion_ids"])
        plan, parts = self._parts(inputs)
        # All tokens of the rollouts, of which a step may use a part; DDP averages over processes.
        share = accumulated / self.arguments.steps_per_generation
        step_tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes * share
        if self.group is not None:  # of as many rows as this process computes
            step_tokens = step_tokens * self.group.size
        loss = self._run(model, parts, rows * accumulated, step_tokens)
        if len(parts) > 1:
            keep_scores(inputs, parts[: len(plan)], plan)
        if self.group is not None:
            keep_own_scores(own, inputs, self.group)
        if self.accelerator.sync_gradients:
            self._finish()
        return loss

    def streamed_loss(self, model: torch.nn.Module, batches: Iterator[dict], rows: int) -> torch.Tensor:
        """Compute the loss of a step whose `rows` rows come in batches, each passed backward before the next is asked
        for; otherwise as `loss`.

        The tokens of the step are known with its last batch. Where the loss is divided by them, gradients and loss are
        divided by the tokens so far and rescaled with each batch.
        """
        total, tokens, is_last = torch.zeros((), device=self.accelerator.device), None, False
        for batch in batches:
            before, is_last = tokens, batch[LAST]
            fresh = batch["num_items_in_batch"].float() / self.accelerator.num_processes
            tokens = fresh if before is None else before + fresh
            if before is not None and self.settings.loss_type in BY_TOKENS:
                scale = before.clamp(min=1.0) / tokens.clamp(min=1.0)
                scale_gradients(model, scale)
                total = total * scale
            _, parts = self._parts(batch)
            loss = self._run(model, parts, rows, tokens.clamp(min=1.0), is_last)
            total = total + loss.detach()
        if not is_last:
            raise RuntimeError("the rows of a step ended before its last batch")
        self._finish()
        return loss + (total - loss.detach())

    def _parts(self, inputs: dict) -> tuple[list[list[int]], list[dict]]:
        """Return rows by micro-batch, and the micro-batches with the reference's log-probs, idle ones last."""
        rows = len(inputs["completion_ids"])
        plan = [list(range(rows))] if self.config.train.micro_batch_tokens is None else self.plan(inputs)
        if self.dropouts:
            seed_of(inputs)
        idle = self._idle_parts(inputs, plan)
        parts = [inputs] if len(plan) == 1 and not idle else [take_rows(inputs, rows) for rows in plan] + idle
        for number, part in enumerate(parts if self.dropouts else ()):
            part[SEED] += number
        for part in parts if self.config.train.micro_batch_tokens else ():
            self.pack(part)
        self._score_packs(parts)
        return plan, parts

    def _run(
        self,
        model: torch.nn.Module,
        parts: list[dict],
        step_rows: int,
        step_tokens: torch.Tensor,
        is_last: bool = True,
    ) -> torch.Tensor:
        """Run micro-batches forward and backward, the step's last one only forward: the caller passes the result
        backward. Its value covers all of them."""
        total: torch.Tensor | float = 0.0
        for number, part in enumerate(parts, start=1):
            is_open = is_last and number == len(parts)
            # DDP exchanges the sum of the gradients once, in the last backward. FSDP2 hides what it has not exchanged
            # from `scale_gradients`, so it exchanges that of each batch.
            is_summed = number == len(parts) and (is_last or self.policy.is_split)
            with contextlib.nullcontext() if is_summed else self.accelerator.no_sync(model):
                if IDLE in part:
                    loss = self.no_loss(model, part)
                else:
                    loss = self.loss_of_rows(model, part, step_rows, step_tokens)
                if not is_open:
                    self._backward(loss)
            total += loss.detach()
        # The gradient is the last one's: the others' is in the parameters already.
        return loss + (total - loss.detach())

    def _finish(self) -> None:
        tally, self.tally = self.tally, StepTally()
        self.finish(tally)

    def _idle_parts(self, inputs: dict, plan: list[list[int]]) -> list[dict]:
        """Idle micro-batches that bring this process to the largest count of any process; empty if passes need no
        other process. Each is the shortest row, which costs least."""
        if self.config.train.micro_batch_tokens is None or not self.policy.waits_in_every_pass:
            return []
        mine = torch.tensor([len(plan)], device=self.accelerator.device)
        most = int(self.accelerator.gather(mine).max())
        lengths = inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1)  # (B,)
        shortest = int(lengths.argmin())
        return [take_rows(inputs, [shortest]) | {IDLE: True} for _ in range(most - len(plan))]

    def no_loss(self, model: torch.nn.Module, rows: dict) -> torch.Tensor:
        """A loss of 0 by the same forward as `loss_of_rows`, so that its backward takes part in the others'."""
        return self.score(model, rows)[0].sum() * 0.0

    def _backward(self, loss: torch.Tensor) -> None:
        """The backward of a micro-batch that is not the step's last."""
        if self.policy.is_deepspeed:  # accelerate's own would make the update; transformers scales by nothing either
            self.accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=False, scale_wrt_gas=False)
        else:
            self.accelerator.backward(loss)

    def loss_of_rows(
        self, model: torch.nn.Module, rows: dict, step_rows: int, step_tokens: torch.Tensor
    ) -> torch.Tensor:
        """A micro-batch's part of the loss of a step with `step_rows` rows of this process."""
        logps, entropies = self.score(model, rows)  # (b, C) each
        mask, sampler = loss_mask(rows), rows.get("sampling_per_token_logps")  # (b, C)
        if "old_per_token_logps" not in rows:
            old = logps.detach()
            if (replayed := rows.get(REPLAYED)) is not None:  # NaN at what this step sampled
                old = old.where(replayed.isnan(), replayed)
            rows["old_per_token_logps"] = old
            if sampler is not None:
                fresh = mask if replayed is None else mask * replayed.isnan()
                if self.group is not None and self.group.rank:  # the first process of a group compares its rows
                    fresh = torch.zeros_like(fresh)
                self.tally.compared.append((logps.detach(), sampler, fresh))
        inputs = LossInputs(
            logps=logps,
            entropies=entropies,
            old_logps=rows["old_per_token_logps"],
            advantages=rows["advantages"],
            mask=mask,
            ref_logps=rows.get("ref_per_token_logps"),
            sampler_logps=sampler,
            step_rows=step_rows,
            step_tokens=step_tokens,
            entropy_threshold=self._entropy_threshold(entropies, mask),
        )
        try:
            loss, figures = compute_loss(inputs, self.settings, self.function)
        except LossFailed as error:
            trace = f" Traceback: {keep_traceback(self.run, error.__cause__)}" if error.__cause__ else ""
            raise CheckFailed(f"step {self.policy.version + 1}: {error}{trace}") from error
        self.tally.add(figures)
        return loss

    def finish(self, tally: StepTally) -> None:
        """Record the metrics of the step's forwards; raises `CheckFailed` if the sampler is not the policy."""
        figures = tally.figures
        everywhere = LossFigures(
            figures.names,
            self.accelerator.reduce(figures.totals, "sum"),
            self.accelerator.gather(figures.extremes[None]),  # (processes, 2)
        )
        for name, value in everywhere.read().items():
            self.metrics[name].append(value)
        if self.settings.entropy_coef:
            self.metrics["entropy_coef"].append(self.settings.entropy_coef)
        if self.config.rollout.routing != "own":
            self.figures.values |= routing_figures(self.accelerator.reduce(self.figures.take_routing(), "sum"))
        self.judge_sampler(tally.compared)

    def plan(self, inputs: dict) -> list[list[int]]:
        """The rows of each micro-batch of packs."""
        train = self.config.train
        budget = train.micro_batch_tokens * train.sequence_parallel  # tokens of a process, tokens of a pack
        prompts = zip(inputs["prompt_ids"].tolist(), inputs["prompt_mask"].sum(dim=1).tolist(), strict=True)
        return plan_micro_batches(
            [tuple(ids[len(ids) - length :]) for ids, length in prompts],  # padded on the left
            inputs["completion_mask"].sum(dim=1).tolist(),
            budget,
            train.share_prompts,
        )

    def score(self, model: torch.nn.Module, rows: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies (b, C) of the rows' completions, with the adapter's dropout on and the same masks at
        every update with these rows."""
        dropping: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.dropouts:
            dropping = seeded(seed_of(rows), self.accelerator.device)
        with dropping:
            return self._logps(model, rows, compute_entropy=True)

    def add_reference(self, batch: dict) -> None:
        """Add the reference's log-probs (B, C) to newly sampled rows; packs get theirs with the loss."""
        if self.config.train.micro_batch_tokens is None and self.settings.beta:
            size = self.arguments.per_device_train_batch_size
            parts = [take_rows(batch, rows) for rows in torch.arange(len(batch["completion_ids"])).split(size)]
            self._score_reference(parts)
            batch["ref_per_token_logps"] = torch.cat([part["ref_per_token_logps"] for part in parts])

    def sampled_kl(self, batch: dict) -> torch.Tensor:
        """KL to the reference of newly sampled rows (B,), nats per completion: the sum over its tokens of
        log π - log π_ref, as in trl 1.16's RLOOTrainer. Logs `kl`, the mean over all tokens of the k3 of these
        log-probs, as the loss does; it is never negative."""
        own, train = len(batch["completion_ids"]), self.config.train
        if self.group is not None:
            batch = shared_rows(batch, self.group)
        rows = len(batch["completion_ids"])
        size = self.arguments.per_device_train_batch_size
        is_padded = train.micro_batch_tokens is None
        plan = (
            [list(range(at, min(at + size, rows))) for at in range(0, rows, size)] if is_padded else self.plan(batch)
        )
        parts = [take_rows(batch, rows) for rows in plan] + self._idle_parts(batch, plan)
        self._score_reference(parts)
        with self.figures.timed("reference"), torch.no_grad(), self.policy.not_checkpointed(self.policy.model):
            for part in parts:
                logps, _ = self._logps(self.policy.model, part, compute_entropy=False)
                part["kl"] = (logps - part["ref_per_token_logps"]) * loss_mask(part)  # (b, C)
        order = torch.tensor([row for part in plan for row in part]).argsort()
        kl = torch.cat([part["kl"] for part in parts[: len(plan)]])[order]  # (B, C)
        k3 = torch.stack([((-kl).exp() - 1 + kl).sum(), loss_mask(batch).sum().to(kl.dtype)])
        total, tokens = self.accelerator.reduce(k3, "sum").tolist()
        self.metrics["kl"].append(total / max(tokens, 1.0))
        first = 0 if self.group is None else self.group.rank * own
        return kl.sum(dim=1)[first : first + own]

    def _score_packs(self, parts: list[dict]) -> None:
        """Add the reference's log-probs (b, C) to micro-batches of packs."""
        if self.config.train.micro_batch_tokens and self.settings.beta and "ref_per_token_logps" not in parts[0]:
            self._score_reference(parts)

    def _score_reference(self, parts: list[dict]) -> None:
        policy, model = self.policy, self.policy.model
        instead = policy.reference()
        with self.figures.timed("reference"), torch.no_grad(), policy.not_checkpointed(model), instead:
            for part in parts:
                part["ref_per_token_logps"], _ = self._logps(model, part, compute_entropy=False)

    def _logps(self, model: torch.nn.Module, rows: dict, compute_entropy: bool) -> tuple:
        train, columns = self.config.train, rows["completion_ids"].size(1)
        routing = self._routing(rows, is_counted=compute_entropy)  # the reference's forwards have no entropy
        if train.micro_batch_tokens is None:
            given = *whole_rows(rows), columns, compute_entropy, routing, self.field
            return padded_logps(self.accelerator, model, *given)
        return pack_logps(self, model, self.pack(rows), compute_entropy, routing, self.field, self.group)

    def pack(self, rows: dict) -> Pack:
        """The pack of a micro-batch, made once for all of its passes."""
        if PACK not in rows:
            train, data = self.config.train, (*whole_rows(rows), rows["completion_ids"].size(1))
            settings = train.share_prompts, train.packed_attention, self.group
            rows[PACK] = make_pack(self, self.policy.model, *data, *settings)
        return rows[PACK]

    def _routing(self, rows: dict, is_counted: bool) -> Routing | None:
        """The sampler's experts for all tokens of the rows; None: the trainer's own. Policy and reference use the
        same, so a policy that has not moved has a KL of exactly 0."""
        if (experts := rows.get("sampling_experts")) is None:
            return None
        is_replayed = self.config.rollout.routing == "replay"
        return Routing(experts.flatten(0, 1), is_replayed, self.figures.routing if is_counted else None)

    def _entropy_threshold(self, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """The minimum entropy of a token (b, C) to learn from, over all processes; None: all tokens are used."""
        if self.settings.top_entropy_quantile >= 1:
            return None
        mine = entropies.detach()[mask.bool()].float()  # (N,)
        padded = self.accelerator.pad_across_processes(mine, dim=0, pad_index=NO_ENTROPY)
        everywhere = self.accelerator.gather(padded)
        return entropy_threshold(everywhere[everywhere != NO_ENTROPY], self.settings.top_entropy_quantile)

    def judge_sampler(self, compared: list[tuple[torch.Tensor, ...]]) -> None:
        """Record how far the sampler is from the policy on the step's rows (b, C); `SamplerIsNotThePolicy` above
        `rollout.max_sampler_k3` or if a sampler's log-prob is NaN. A no-op if none was compared."""
        if not compared:
            return
        widest = max(logps.size(1) for logps, *_ in compared)
        compared = [tuple(pad_columns(one, widest) for one in each) for each in compared]
        policy, sampler, mask = (torch.cat(each) for each in zip(*compared, strict=True))  # (B, C)
        local = torch.stack([policy, sampler, mask.to(policy.dtype)]).transpose(0, 2).contiguous()  # (C, B, 3)
        # Completions are padded per process; percentiles need the tokens of all of them.
        everywhere = self.accelerator.gather(self.accelerator.pad_across_processes(local, dim=0))
        width = len(everywhere) // self.accelerator.num_processes
        policy, sampler, mask = torch.cat(everywhere.split(width), dim=1).permute(2, 1, 0)  # (N, C) each
        settings, rollout = self.settings, self.config.rollout
        correction = settings.correction, settings.correction_cap, settings.correction_floor
        figures = measure(policy, sampler, mask, *correction)
        self.figures.values |= figures
        self._log_sampler(figures, policy, sampler, mask)
        is_ahead = rollout.overlap and self.figures.version < self.policy.version
        if fault := describe_fault(figures, rollout.max_sampler_k3, is_ahead):
            raise SamplerIsNotThePolicy(f"step {self.policy.version + 1}: {fault}")

    def _log_sampler(self, figures: dict, policy: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> None:
        """Log the metrics, and TRL's statistics of the ratios, for the trackers; tensors (N, T) of all processes."""
        found = {f"sampler/{key.removeprefix('sampler_')}": value for key, value in figures.items()}
        settings = self.settings
        if settings.correction != "none" and mask.any():
            correction = settings.correction, settings.correction_cap, settings.correction_floor
            ratio = importance_ratio(policy, sampler, mask, *correction)
            ratio = ratio if settings.correction.startswith("sequence") else ratio[mask.bool()]
            for name in ("min", "mean", "max"):
                found[f"sampling/importance_sampling_ratio/{name}"] = getattr(ratio, name)().item()
        for key, value in found.items():
            if value is not None:
                self.metrics[key].append(value)
