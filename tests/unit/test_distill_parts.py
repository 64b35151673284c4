"""The loss of a distillation against the models' own logits in float64, without a run: tiny random models."""

import contextlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.train.distill_trainer import DistillStep, Head, distill_arguments
from kit.train.figures import StepFigures
from kit.train.loss import LossSettings
from tests.conftest import CONFIG
from tests.unit.test_packing import SIZE, tiny

LENGTHS, ENDS, PROMPT, WIDTH = [3, 3, 6, 6], [5, 2, 4, 1], 6, 5


@pytest.fixture(scope="module")
def student():
    torch.manual_seed(0)
    return spread(tiny().eval())


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(1)
    return spread(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZE)).eval())


def spread(model):
    """The model with logits that are far from equal."""
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    return model


def rows() -> dict:
    """Two prompts with two completions each, padded left and right."""
    draw = torch.Generator().manual_seed(2)
    prompts = torch.randint(5, 80, (2, PROMPT), generator=draw).repeat_interleave(2, 0)
    mask = (torch.arange(WIDTH) < torch.tensor(ENDS)[:, None]).long()
    return {
        "prompt_ids": prompts,
        "prompt_mask": (torch.arange(PROMPT) >= PROMPT - torch.tensor(LENGTHS)[:, None]).long(),
        "completion_ids": torch.randint(5, 80, (4, WIDTH), generator=draw),
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
    }


class Accelerator:
    device, sync_gradients, num_processes, process_index = torch.device("cpu"), True, 1, 0

    def __init__(self):
        self.silent, self.seen = 0, []

    def autocast(self):
        return contextlib.nullcontext()

    def unwrap_model(self, model):
        return model

    def reduce(self, tensor, how):
        return {"sum": tensor * self.num_processes, "mean": tensor}[how]

    def pad_across_processes(self, tensor, dim):
        return tensor

    def gather(self, tensor):
        return tensor

    def backward(self, loss):
        self.seen.append(bool(self.silent))
        loss.backward()

    @contextlib.contextmanager
    def no_sync(self, model):
        self.silent += 1
        yield
        self.silent -= 1


def step_of(student, teacher, *changes: str, steps: int = 1):
    """A distillation's step without a trainer."""
    config = load_config(CONFIG, ["--distill.teacher=other", *changes])
    policy = SimpleNamespace(processes=Accelerator(), model=student, unwrapped=student, version=0)
    policy.waits_in_every_pass = policy.is_deepspeed = False
    arguments = SimpleNamespace(steps_per_generation=steps, temperature=0.7)
    figures = StepFigures(torch.device("cpu"))
    facts = (config, None, policy, arguments, LossSettings(), None, figures, defaultdict(list))
    given = SimpleNamespace(other=teacher, of=lambda model: contextlib.nullcontext(teacher))
    return DistillStep(*facts, teacher=given)


def logits(model, inputs: dict) -> torch.Tensor:
    """Logits of the completions' tokens (N, V), float64, each row alone and without padding."""
    found = []
    for row, (length, end) in enumerate(zip(LENGTHS, ENDS, strict=True)):
        ids = torch.cat([inputs["prompt_ids"][row, PROMPT - length :], inputs["completion_ids"][row, :end]])
        found.append(model(input_ids=ids[None]).logits[0, length - 1 : -1])
    return torch.cat(found).double()


def direct(student: torch.Tensor, teacher: torch.Tensor, kind: str, b: float) -> torch.Tensor:
    """The divergence (N,), as the docstring of distill_trainer.py has it."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    if kind != "js":
        p, q = (p, q) if kind == "reverse_kl" else (q, p)
        return (p * (p / q).log()).sum(-1)
    m = (1 - b) * p + b * q
    return b * (q * (q / m).log()).sum(-1) + (1 - b) * (p * (p / m).log()).sum(-1)


def gradient(student) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in student.parameters() if one.grad is not None])


@pytest.mark.parametrize("packed", [(), ("--train.micro_batch_tokens=104",), ("--train.micro_batch_tokens=9",)])
@pytest.mark.parametrize(
    ("kind", "b", "temperature"),
    [("reverse_kl", None, 1.0), ("forward_kl", None, 2.0), ("js", 0.2, 0.5), ("js", 0.8, 1.5)],
)
def test_a_step_is_the_configured_divergence_at_its_temperature(student, teacher, kind, b, temperature, packed):
    keys = [f"--distill.divergence={kind}", f"--distill.temperature={temperature}"]
    made = step_of(student, teacher, *keys, *([] if b is None else [f"--distill.js_beta={b}"]), *packed)
    inputs = rows()
    student.zero_grad()
    loss = made.loss(student, dict(inputs), 1)
    micro_batches = 1 if packed != ("--train.micro_batch_tokens=9",) else len(made.plan(inputs))
    assert (micro_batches > 1) == (packed == ("--train.micro_batch_tokens=9",))
    # Only the last backward, the caller's, exchanges gradients.
    assert made.accelerator.seen == [True] * (micro_batches - 1) and not made.accelerator.silent
    loss.backward()
    found = gradient(student)
    student.zero_grad()
    with torch.no_grad():
        target = logits(teacher, inputs) / temperature
    ours = logits(student, inputs) / temperature
    wanted = direct(ours, target, kind, b)
    wanted.mean().backward()
    assert loss.item() == pytest.approx(wanted.mean().item(), rel=1e-4) and loss > 1e-3
    assert (found - gradient(student)).norm() < 1e-3 * gradient(student).norm()
    assert made.metrics["divergence"] == [pytest.approx(wanted.mean().item(), rel=1e-4)]
    p = ours.softmax(-1)
    assert made.metrics["entropy"] == [pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-4)]


@pytest.mark.parametrize("packed", [(), ("--train.micro_batch_tokens=104",)])
def test_the_sampler_is_compared_at_its_own_temperature_and_once_a_batch(student, teacher, packed):
    made = step_of(student, teacher, "--distill.temperature=3", "--rollout.max_sampler_k3=1e6", *packed)
    inputs = rows()
    with torch.no_grad():
        scores = (logits(student, inputs) / 0.7).log_softmax(-1)
    own = torch.zeros(4, WIDTH)
    seen = inputs["completion_mask"].bool()
    own[seen] = scores.gather(1, inputs["completion_ids"][seen][:, None])[:, 0].float()
    inputs["sampling_per_token_logps"] = own.where(seen, torch.nan)  # what is padding is not compared
    made.loss(student, inputs, 1)
    assert made.figures.values["sampler_delta_max"] < 1e-4 and made.figures.values["sampler_nan_count"] == 0
    assert "sampling_per_token_logps" not in inputs
    made.loss(student, inputs | {"sampling_per_token_logps": own - 0.25}, 1)
    assert made.figures.values["sampler_delta_mean"] == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("processes", "steps", "accumulated"), [(1, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 4), (2, 4, 2)]
)
def test_a_process_weighs_its_tokens_by_those_of_a_whole_step(student, teacher, processes, steps, accumulated):
    made = step_of(student, teacher, steps=steps)
    made.accelerator.num_processes = processes
    inputs = rows()
    with torch.no_grad():
        total = direct(logits(student, inputs), logits(teacher, inputs), "reverse_kl", 1.0).sum().item()
    # The tokens of all processes' rows of one generation; a step has `accumulated` of its `steps` parts, and DDP takes
    # the mean over processes.
    inputs["num_items_in_batch"] = torch.tensor(100.0)
    tokens_a_step = 100.0 * accumulated / steps
    assert made.loss(student, inputs, accumulated).item() == pytest.approx(processes * total / tokens_a_step, rel=1e-4)


def test_a_report_is_of_its_own_step_over_the_tokens_of_all_processes(student, teacher):
    made = step_of(student, teacher)
    made.accelerator.num_processes = 3
    for sums, wanted in (
        ((6.0, 3.0, 12.0), (0.5, 0.25)),
        ((2.0, 4.0, 2.0), (1.0, 2.0)),
        ((0.0, 0.0, 0.0), (0.0, 0.0)),
    ):
        made._sums = torch.tensor(sums)
        made._report()
        found = made.metrics["divergence"][-1], made.metrics["entropy"][-1]
        assert found == pytest.approx(wanted) and made._sums is None


def test_the_parts_of_a_step_are_reported_together(student, teacher):
    made = step_of(student, teacher)
    made.accelerator.sync_gradients = False
    with torch.no_grad():
        for _ in range(3):
            made.loss(student, rows(), 1)
        assert not made.metrics and made._sums[2] == 3 * sum(ENDS)
        made.accelerator.sync_gradients = True
        made.loss(student, rows(), 1)
    assert len(made.metrics["divergence"]) == 1 and made._sums is None


HEADS = {
    "qwen2": {},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 0.4, "sliding_window": 64},
    "phi": {},
}


@pytest.mark.parametrize(("model_type", "changes"), HEADS.items())
def test_the_head_gives_the_models_own_logits(model_type, changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZE | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    head, ids = Head.of(model), torch.randint(5, 80, (2, 7))
    with torch.no_grad():
        states = model.base_model(input_ids=ids).last_hidden_state
        for words in (SIZE["vocab_size"], 50):
            weight, bias, scale, cap = head.first(words)
            found = states @ weight.T + (0 if bias is None else bias)
            found = found * scale
            found = found if cap is None else cap * torch.tanh(found / cap)
            assert found.shape[-1] == words
            torch.testing.assert_close(found, model(input_ids=ids).logits[..., :words], rtol=1e-4, atol=1e-5)
    assert (head.scale, head.softcap) == {
        "granite": (0.25, None),
        "cohere": (0.3, None),
        "gemma2": (1.0, 0.4),
    }.get(model_type, (1.0, None))


def test_a_field_that_only_the_loss_of_grpo_reads_is_refused(tmp_path):
    config = load_config(CONFIG, ["--distill.teacher=base", "--train.trl={adam_beta2: 0.9}"])
    assert distill_arguments(config, RunDir(tmp_path)).adam_beta2 == 0.9
    config.train.trl = {"delta": 2.0}
    with pytest.raises(BadInput, match=r"train\.trl\.delta"):
        distill_arguments(config, RunDir(tmp_path))
