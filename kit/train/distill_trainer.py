"""On-policy distillation: the loss of a step is a divergence between student and teacher on the student's tokens.

Written for trl 1.16. The divergence, its gradient and its memory are TRL's `ChunkedDivergenceFunction`, the kernel of
its `DistillationTrainer`. That trainer itself does not fit: it syncs weights to a vLLM server by merging the adapter,
which does not work in NF4; it samples one completion per prompt and drops the sampler's log-probs, so nothing would
show whether the server samples from the student; its teacher is a second model; and its rows are padded.
`PolicyTrainer` has everything but the loss: rollouts, sync, canary, k3, held-out accuracy, packing, records,
checkpoints. So this is that trainer with another loss. Rewards are computed and recorded, but not learned from.

    loss = Σ over the completions' tokens of D(student, teacher) / number of these tokens in the step, nats per token

Both are softmax(logits / distill.temperature) over the whole vocabulary. With p (student), q (teacher) and
m = (1 - b) p + b q, b = js_beta:

    reverse_kl  Σ p log(p/q)        forward_kl  Σ q log(q/p)        js  b Σ q log(q/m) + (1 - b) Σ p log(p/m)

No gradient flows through the sampling, as in arXiv 2306.13649. The teacher's pass comes before the student's, so that
only its last hidden states (tokens, hidden) are held while the student's activations are alive. Logits of both models
exist for `chunk_tokens` x 32,768 words at a time, in float32: 256 KiB per token, plus 64 KiB for the gradients in 16
bits; at 1,024 tokens 0.3 GiB, regardless of micro-batch and vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from trl.kernels import ChunkedLogProbFunction, chunked_divergence
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.models.utils import _ForwardRedirection

from kit.core.config.distill_rules import settled
from kit.core.config.schema import Config, DistillConfig
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.policy.packed.attention import use_packed_attention
from kit.policy.teacher import Teacher
from kit.train.loss import LossFunction
from kit.train.rows import padded_positions, takes_positions, whole_rows
from kit.train.step import PolicyStep, StepTally
from kit.train.trainer import PolicyTrainer, loss_settings, trainer_arguments

WORDS = 32768  # vocabulary entries of a tile
# Metrics of GRPO's update that a distillation does not have.
NOT_HERE = ("kl", "zero_spread_fraction", "clip_fraction", "corrected_token_fraction", "corrected_sequence_fraction")


def distill_arguments(config: Config, run: RunDir) -> Any:
    """TRL's arguments for a checked configuration; raises `BadInput` also for a key of `train.trl` that only GRPO's
    loss reads."""
    from trl import DistillationConfig

    for key in config.train.trl:
        if key not in DistillationConfig.__dataclass_fields__:
            raise BadInput(f"train.trl.{key} does nothing in a distillation. Remove it.")
    return trainer_arguments(settled(config), run)


def beta_of(distill: DistillConfig) -> float:
    """TRL's beta: 0 is the forward KL, 1 the reverse KL, in between the share of the teacher in the mixture."""
    return {"forward_kl": 0.0, "reverse_kl": 1.0}.get(distill.divergence, distill.js_beta)


class Head(NamedTuple):
    """The output head, hidden states to logits: softcap(scale · (states · weightᵀ + bias))."""

    weight: torch.Tensor  # (V, hidden)
    bias: torch.Tensor | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: torch.nn.Module) -> "Head":
        """The head of `model`, read from its configuration as trl 1.16's `add_fused_lm_head` does; within the model's
        forward if the base is split over processes."""
        layer, facts = model.get_output_embeddings(), model.config.get_text_config()
        names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
        scale = next((value for name in names if (value := getattr(facts, name, None)) is not None), None)
        if scale is None and (divisor := getattr(facts, "logits_scaling", None)) is not None:
            scale = divisor if facts.model_type == "hyperclovax" else 1 / divisor
        cap = getattr(facts, "final_logit_softcapping", None)
        weight, bias = (
            one.full_tensor() if isinstance(one, DTensor) else one
            for one in (layer.weight, getattr(layer, "bias", None))
        )
        return cls(weight, bias, 1.0 if scale is None else scale, cap)

    @property
    def words(self) -> int:
        """Entries of its vocabulary, also where ZeRO-3 has not gathered it."""
        return getattr(self.weight, "ds_shape", self.weight.shape)[0]

    def first(self, words: int) -> "Head":
        """The head of the first `words` entries of the vocabulary; those beyond the tokenizer's last are padding."""
        if words == self.words:
            return self
        return self._replace(weight=self.weight[:words], bias=None if self.bias is None else self.bias[:words])


def divergence(
    student: torch.Tensor, head: Head, teacher: torch.Tensor, teacher_head: Head, beta: float, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence and the student's entropy (N,), nats, of hidden states (N, hidden); gradients reach `student` only.
    The hidden sizes may differ, and so may the vocabulary sizes: only the shared entries are compared."""
    words = min(head.words, teacher_head.words)
    head, teacher_head = head.first(words), teacher_head.first(words)
    return ChunkedDivergenceFunction.apply(
        *(student, head.weight, head.bias, teacher, teacher_head.weight, teacher_head.bias, beta, temperature),
        *(head.scale, head.softcap, teacher_head.scale, teacher_head.softcap),
    )


class Batch(NamedTuple):
    """Rows of a step as model inputs, and where in them the N tokens of completions are predicted."""

    inputs: dict
    predicting: torch.Tensor  # (N,) positions in the flattened rows that predict a token of a completion
    tokens: torch.Tensor  # (N,) the tokens
    place: torch.Tensor  # (N,) where they are in the flattened completions (b, C)


def last_states(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The hidden states (N, hidden) of a causal language model before its head, where `batch` predicts."""
    states = model.base_model(**batch.inputs, use_cache=False).last_hidden_state
    return states.flatten(0, 1)[batch.predicting]


class DistillStep(PolicyStep):
    """The step of a distillation: no rewards, no old log-probs, no reference."""

    def __init__(self, *facts: Any, teacher: Teacher):
        super().__init__(*facts)
        self.teacher, distill = teacher, self.config.distill
        self._beta = beta_of(distill)
        chunked_divergence.TOKEN_CHUNK_SIZE = distill.chunk_tokens
        self._through_wrapper = _ForwardRedirection()
        self._sums: torch.Tensor | None = None  # of divergence, entropy and tokens since the last report

    def loss(self, model: torch.nn.Module, inputs: dict, accumulated: int) -> torch.Tensor:
        """As `PolicyStep.loss`; raises `CheckFailed` if the sampler is not the student."""
        loss = super().loss(model, inputs, accumulated)
        inputs.pop("sampling_per_token_logps", None)  # stale when the batch is reused
        return loss

    def loss_of_rows(
        self, model: torch.nn.Module, inputs: dict, step_rows: int, step_tokens: torch.Tensor
    ) -> torch.Tensor:
        each, entropy, compared = self._passes(model, inputs)
        self.tally.compared += compared
        sums = torch.stack([each.detach().sum(), entropy.sum(), each.new_tensor(len(each))])
        self._sums = sums if self._sums is None else self._sums + sums
        # Divided by all tokens of the step, as in TRL's dapo, so all tokens weigh the same.
        return each.sum() / step_tokens

    def no_loss(self, model: torch.nn.Module, rows: dict) -> torch.Tensor:
        return self._passes(model, rows)[0].sum() * 0.0

    def _passes(
        self, model: torch.nn.Module, inputs: dict
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The teacher's pass and the student's: divergence and entropy (N,) of the rows' tokens, and the student's and
        the sampler's log-probs (N,) of them if there are the sampler's."""
        student, sampler = self.accelerator.unwrap_model(model), inputs.get("sampling_per_token_logps")
        base, is_own = student.get_base_model(), self.teacher.other is None

        def learn(batch: Batch, target: torch.Tensor, teacher_head: Head | None) -> tuple:
            states, head = last_states(base, batch), Head.of(base)
            same = head if teacher_head is None else teacher_head
            found = divergence(states, head, target, same, self._beta, self.config.distill.temperature)
            return *found, [] if sampler is None else [self._compare(states.detach(), head, batch, sampler)]

        with self.accelerator.autocast():
            batch = self.batch(student, inputs)
            with torch.no_grad(), self.figures.timed("teacher"), self.teacher.of(student) as teacher:
                if is_own and self.policy.is_split:  # its weights are gathered from the wrapper's forward on
                    target = self._through_wrapper(model, student, last_states, teacher, batch)
                else:
                    target = last_states(teacher, batch)
            teacher_head = None if is_own else Head.of(self.teacher.other)
            return self._through_wrapper(model, student, learn, batch, target, teacher_head)  # as DDP wants it

    def batch(self, student: torch.nn.Module, inputs: dict) -> Batch:
        """Rows as inputs of the student: padded, or with `train.micro_batch_tokens` in one pack."""
        if self.config.train.micro_batch_tokens is None:
            ids, mask = whole_rows(inputs)  # (b, W)
            width, length = ids.size(1), inputs["completion_ids"].size(1)
            row, column = inputs["completion_mask"].nonzero(as_tuple=True)
            label = row * width + width - length + column
            given = {"input_ids": ids, "attention_mask": mask}
            if takes_positions(student):
                given["position_ids"] = padded_positions(mask)
            return Batch(given, label - 1, ids.flatten()[label], row * length + column)
        packed, place, _ = self.pack(inputs)
        given = {"input_ids": packed.tokens, "attention_mask": packed.mask, "position_ids": packed.positions}
        return Batch(given, packed.scored, packed.labels[0, packed.scored], place)

    def _compare(
        self, states: torch.Tensor, head: Head, batch: Batch, sampler: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The student's and the sampler's log-probs (N,) of the sampled tokens; the sampler's are (b, C)."""
        weight, bias, scale, cap = head
        scores = (self.arguments.temperature, WORDS, cap, scale, ("log_probs",))
        with torch.no_grad():
            logps = ChunkedLogProbFunction.apply(states, weight, bias, batch.tokens, *scores)[0]
        return logps.float(), sampler.flatten()[batch.place].float()

    def finish(self, tally: StepTally) -> None:
        self._report()
        if tally.compared:
            policy, sampler = (torch.cat(each)[None] for each in zip(*tally.compared, strict=True))  # (1, N)
            self.judge_sampler([(policy, sampler, torch.ones_like(policy))])

    def _report(self) -> None:
        """Log the step's mean divergence and entropy, nats per token, over all processes."""
        total, entropy, tokens = self.accelerator.reduce(self._sums, "sum").tolist()
        self._sums = None
        self.metrics["divergence"].append(total / max(tokens, 1.0))
        self.metrics["entropy"].append(entropy / max(tokens, 1.0))


class DistillTrainer(PolicyTrainer):
    """`PolicyTrainer` whose update follows a teacher; also records `divergence` and `seconds.teacher`."""

    def __init__(self, *, config: Config, other_teacher: torch.nn.Module | None = None, **kwargs: Any):
        self._other_teacher = other_teacher
        super().__init__(config=settled(config), **kwargs)

    def _make_step(self, loss: LossFunction | None) -> DistillStep:
        teacher, other = Teacher(self.config, self.model, self._other_teacher), self._other_teacher
        if other is not None and self.config.train.micro_batch_tokens is not None:
            use_packed_attention(other)
        facts = self.config, self.run, self.policy, self.args, loss_settings(self.args, self.config), None
        return DistillStep(*facts, self.figures, self._metrics["train"], teacher=teacher)

    def _record(self, logs: dict, step: int) -> dict:
        record = super()._record(logs, step) | dict.fromkeys(NOT_HERE)
        return {**record, "divergence": logs.get("divergence")}
