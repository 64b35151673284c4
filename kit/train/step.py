"""One optimizer step: sample, reward, advantage, loss, update.

    _generate_and_score_completions   TRL samples, calls the rewards and computes advantages; flat groups teach nothing
    compute_loss                      micro-batch by micro-batch: forward, loss (`loss.py`), backward
    _finish_step                      the step's figures; the run stops here when the sampler is not the policy

transformers makes the update after the last backward, which it calls on what `compute_loss` returns. With
`train.micro_batch_tokens` a process gets all rows of its step at once; otherwise those of an accumulation step, which
are one micro-batch.

- Old log-probs are those of the first forward over a batch: the policy has not moved by then. No extra pass is made.
- The reference goes through the same packs as the policy, so a policy that has not moved has a KL of exactly 0. Adam
  would make steps of the gradient that rounding leaves.
- The adapter's dropout is on in the forward for the loss and nowhere else (`adapter_dropout.py`).
- Figures stay on the device until the step's end, and are those of all its rows over all processes.

Written for trl 1.16 and transformers 5.17 to 5.23; `tests/unit/test_trl_seams.py` checks what is relied on.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from trl.models.utils import disable_gradient_checkpointing

from kit.core.errors import CheckFailed
from kit.policy.adapter_dropout import SEED, adapter_dropouts, seed_of, seeded, turned_off
from kit.policy.packed.packing import packed_logps, plan_micro_batches
from kit.train.advantages import find_flat_groups
from kit.train.loss import LossFigures, LossFunction, LossInputs, LossSettings, compute_loss, entropy_threshold
from kit.train.mismatch import describe_problem, importance_ratio, measure
from kit.train.own_loss import LossFailed
from kit.train.record import keep_traceback
from kit.train.rows import keep_scores, take_rows, whole_rows, with_positions
from kit.train.trackers import send_figures

NO_ENTROPY = -1e9  # pads the entropies of processes with fewer tokens

if TYPE_CHECKING:  # the methods and attributes of the class that it stands before
    from trl import GRPOTrainer as Trainer
else:
    Trainer = object


class StepTally:
    """What the micro-batches of one optimizer step leave for its end."""

    def __init__(self) -> None:
        self.figures: LossFigures | None = None
        self.compared: list[
            tuple[torch.Tensor, ...]
        ] = []  # log-probs of policy and sampler and their mask, (b, C) each

    def add(self, figures: LossFigures) -> None:
        self.figures = figures if self.figures is None else self.figures + figures


class PolicyStep(Trainer):
    """Stands before `GRPOTrainer` among the bases of `trainer.PolicyTrainer`, whose attributes it uses."""

    num_iterations: int  # TRL's
    beta: float  # TRL's
    loss_settings: LossSettings
    loss_function: LossFunction | None = None  # `train.loss`; None: the one of `train.loss_type`

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._dropouts = adapter_dropouts(self.model)
        self._tally = StepTally()
        self._rewards: torch.Tensor | None = None  # (all processes' B*G, functions) of the last rollouts

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        iterations, beta = self.num_iterations, self.beta
        # By these TRL decides whether it passes over the batch for old log-probs and for the reference's.
        self.num_iterations = 1
        if self.config.train.micro_batch_tokens is not None:
            self.beta = 0.0
        try:
            with turned_off(self._dropouts):
                output = super()._generate_and_score_completions(inputs)
        finally:
            self.num_iterations, self.beta = iterations, beta
        self._drop_flat_groups(output)
        return output

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of a step's rows, or of those of one accumulation step. `CheckFailed` after the step's last forward
        and before its last backward, so before the update, when the sampler is not the policy."""
        rows, total = len(inputs["completion_ids"]), 0.0
        plan = [list(range(rows))] if self.config.train.micro_batch_tokens is None else self._plan(inputs)
        if self._dropouts:
            seed_of(inputs)
        parts = [inputs] if len(plan) == 1 else [take_rows(inputs, rows) for rows in plan]
        for number, part in enumerate(parts if self._dropouts else ()):
            part[SEED] += number
        self._add_reference(parts)
        step_rows = rows * self.current_gradient_accumulation_steps
        for number, part in enumerate(parts, start=1):
            # DDP exchanges the sum of the gradients once, in the last backward.
            with contextlib.nullcontext() if number == len(parts) else self.accelerator.no_sync(model):
                loss = self._loss_of_rows(model, part, step_rows)
                if number < len(parts):
                    self.accelerator.backward(loss)
            total += loss.detach()
        if len(parts) > 1:
            keep_scores(inputs, parts, plan)
        if self.accelerator.sync_gradients:
            tally, self._tally = self._tally, StepTally()
            self._finish_step(tally)
        # Its value is that of all rows, its gradient that of the last ones: the others' is in the parameters already.
        return loss + (total - loss.detach())

    def _loss_of_rows(self, model: Any, rows: dict, step_rows: int) -> torch.Tensor:
        """The part of a micro-batch in the loss of a step with `step_rows` rows of this process."""
        logps, entropies = self._score(model, rows)  # (b, C) each
        mask, sampler = rows["completion_mask"], rows.get("sampling_per_token_logps")  # (b, C)
        if "old_per_token_logps" not in rows:
            rows["old_per_token_logps"] = logps.detach()
            if sampler is not None:
                self._tally.compared.append((logps.detach(), sampler, mask))
        # All tokens of the rollouts, of which a step may have a part; DDP takes the mean over processes.
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        inputs = LossInputs(
            logps=logps,
            entropies=entropies,
            old_logps=rows["old_per_token_logps"],
            advantages=rows["advantages"],
            mask=mask,
            ref_logps=rows.get("ref_per_token_logps"),
            sampler_logps=sampler,
            step_rows=step_rows,
            step_tokens=rows["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes * share,
            entropy_threshold=self._entropy_threshold(entropies, mask),
        )
        try:
            loss, figures = compute_loss(inputs, self.loss_settings, self.loss_function)
        except LossFailed as error:
            trace = f" Traceback: {keep_traceback(self.run, error.__cause__)}" if error.__cause__ else ""
            raise CheckFailed(f"step {self.state.global_step + 1}: {error}{trace}") from error
        self._tally.add(figures)
        return loss

    def _finish_step(self, tally: StepTally) -> None:
        """Record what the step's forwards left; `CheckFailed` when the sampler is not the policy."""
        figures, metrics = tally.figures, self._metrics["train"]
        everywhere = LossFigures(
            figures.names,
            self.accelerator.reduce(figures.totals, "sum"),
            self.accelerator.gather(figures.extremes[None]),  # (processes, 2)
        )
        for name, value in everywhere.read().items():
            metrics[name].append(value)
        if self.loss_settings.entropy_coef:
            metrics["entropy_coef"].append(self.loss_settings.entropy_coef)
        self._judge_sampler(tally.compared)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _drop_flat_groups(self, output: dict) -> None:
        """Put the advantages of groups with one reward to 0, and count these groups.

        TRL subtracts a mean from them that is off by a rounding (eight times 0.7), and Adam makes whole steps of what
        is left; it counts them by a deviation that this rounding, or one deviation for the batch, hides."""
        are_summed = self.multi_objective_aggregation == "sum_then_normalize"
        flat = find_flat_groups(self._rewards, self.reward_weights, self.num_generations, are_summed)  # (groups,)
        self._metrics["train"]["frac_reward_zero_std"][-1] = flat.float().mean().item()
        rows, kept = flat.repeat_interleave(self.num_generations), len(output["advantages"])
        mine = rows[self.accelerator.process_index * kept :][:kept]
        output["advantages"] = output["advantages"].masked_fill(mine, 0.0)
        shown = self._logs["advantages"]
        for place in rows.nonzero().flatten().tolist():
            shown[place - len(rows)] = 0.0

    def _plan(self, inputs: dict) -> list[list[int]]:
        """The rows of each micro-batch of packs."""
        train = self.config.train
        prompts = zip(inputs["prompt_ids"].tolist(), inputs["prompt_mask"].sum(dim=1).tolist(), strict=True)
        return plan_micro_batches(
            [tuple(ids[len(ids) - length :]) for ids, length in prompts],  # padded on the left
            inputs["completion_mask"].sum(dim=1).tolist(),
            train.micro_batch_tokens,
            train.share_prompts,
        )

    def _add_reference(self, parts: list[dict]) -> None:
        """Add the reference's log-probs (b, C) to micro-batches of packs; without packs TRL adds them to the batch."""
        train, model = self.config.train, self.accelerator.unwrap_model(self.model)
        if self.beta == 0.0 or train.micro_batch_tokens is None or "ref_per_token_logps" in parts[0]:
            return
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with self.timed("reference"), torch.no_grad(), checkpointing, model.disable_adapter():
            for part in parts:
                columns, how = part["completion_ids"].size(1), (train.share_prompts, False, train.packed_attention)
                part["ref_per_token_logps"], _ = packed_logps(self, self.model, *whole_rows(part), columns, *how)

    def _score(self, model: Any, rows: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies (b, C) of the rows' completions, with the adapter's dropout on."""
        train, columns = self.config.train, rows["completion_ids"].size(1)
        with self._dropping(rows):
            if train.micro_batch_tokens is not None:
                how = train.share_prompts, True, train.packed_attention
                return packed_logps(self, model, *whole_rows(rows), columns, *how)
            policy = with_positions(model, self.accelerator.unwrap_model(model))
            score = super()._get_per_token_logps_and_entropies
            return score(policy, *whole_rows(rows), columns, compute_entropy=True)[:2]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        """TRL's pass over a batch for the reference's log-probs."""
        policy = with_positions(model, self.accelerator.unwrap_model(model))
        with self.timed("reference"):
            return super()._get_per_token_logps_and_entropies(policy, *args, **kwargs)

    def _dropping(self, rows: dict) -> contextlib.AbstractContextManager:
        """Around a forward for the loss: the same dropout masks at every update with these rows."""
        if not self._dropouts:
            return contextlib.nullcontext()
        return seeded(seed_of(rows), self.accelerator.device)

    def _entropy_threshold(self, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """The least entropy of a token (b, C) that is learned from, over all processes; None: every token is."""
        if self.loss_settings.top_entropy_quantile >= 1:
            return None
        mine = entropies.detach()[mask.bool()].float()  # (N,)
        padded = self.accelerator.pad_across_processes(mine, dim=0, pad_index=NO_ENTROPY)
        everywhere = self.accelerator.gather(padded)
        return entropy_threshold(everywhere[everywhere != NO_ENTROPY], self.loss_settings.top_entropy_quantile)

    def _judge_sampler(self, compared: list[tuple[torch.Tensor, ...]]) -> None:
        """Record how far the sampler is from the policy on the step's rows (b, C); `CheckFailed` above
        `rollout.max_sampler_k3` or when a sampler's log-prob is not a number. A no-op if none was compared."""
        if not compared:
            return
        policy, sampler, mask = (torch.cat(each) for each in zip(*compared, strict=True))  # (B, C)
        local = torch.stack([policy, sampler, mask.to(policy.dtype)]).transpose(0, 2).contiguous()  # (C, B, 3)
        # Completions are padded per process; percentiles need the tokens of all of them.
        everywhere = self.accelerator.gather(self.accelerator.pad_across_processes(local, dim=0))
        width = len(everywhere) // self.accelerator.num_processes
        policy, sampler, mask = torch.cat(everywhere.split(width), dim=1).permute(2, 1, 0)  # (N, C) each
        rollout = self.config.rollout
        floor = self.args.vllm_importance_sampling_clip_min
        figures = measure(policy, sampler, mask, rollout.correction, rollout.correction_cap, floor)
        self._sampler |= figures
        self._log_sampler(figures, policy, sampler, mask)
        step = self.state.global_step + 1
        is_ahead = rollout.overlap and self._rollout_version < self.state.global_step
        problem = describe_problem(figures, rollout.max_sampler_k3, is_ahead)
        if not problem:
            return
        record = self._record({}, step)
        send_figures(self, record)
        if self.recorder:
            self.recorder.step(record)
        raise CheckFailed(f"step {step}: {problem}")

    def _log_sampler(self, figures: dict, policy: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> None:
        """The figures, and what TRL logs of the ratios, for the trackers; tensors (N, T) of all processes."""
        found = {f"sampler/{key.removeprefix('sampler_')}": value for key, value in figures.items()}
        rollout, floor = self.config.rollout, self.args.vllm_importance_sampling_clip_min
        if rollout.correction != "none" and mask.any():
            ratio = importance_ratio(policy, sampler, mask, rollout.correction, rollout.correction_cap, floor)
            ratio = ratio if rollout.correction.startswith("sequence") else ratio[mask.bool()]
            for name in ("min", "mean", "max"):
                found[f"sampling/importance_sampling_ratio/{name}"] = getattr(ratio, name)().item()
        for key, value in found.items():
            if value is not None:
                self._metrics["train"][key].append(value)
