"""What kit/train/distill_trainer.py takes for granted in trl, and why it does not build on `DistillationTrainer`.

A failure here means that upstream moved: read its change, then adapt the trainer and this file together.
"""

import inspect

import torch
from trl import DistillationTrainer
from trl.kernels import ChunkedLogProbFunction, chunked_divergence
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.models.utils import _ForwardRedirection
from trl.trainer import distillation_trainer

from kit.train import distill_trainer
from kit.train.distill_trainer import Head, beta_of, divergence
from tests.unit.test_trl_seams import shape


def test_the_kernels_take_what_they_are_given():
    assert "Written for trl 1.16." in inspect.getsource(distill_trainer)
    first = "(ctx, student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta"
    found = shape(ChunkedDivergenceFunction.forward)
    assert found == (
        f"{first}, temperature=1.0, student_logit_scale=1.0, student_final_logit_softcapping=None, "
        "teacher_logit_scale=1.0, teacher_final_logit_softcapping=None)"
    )
    assert shape(ChunkedLogProbFunction.forward).startswith(
        "(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0"
    )
    assert shape(_ForwardRedirection.__call__) == "(self, wrapper_module, original_module, method, *args, **kwargs)"


def test_no_more_tokens_have_logits_at_a_time_than_the_constant_says(monkeypatch):
    sizes, project = [], chunked_divergence._project

    def watch(tile: torch.Tensor, *others: object) -> None:
        sizes.append(tuple(tile.shape))
        project(tile, *others)

    monkeypatch.setattr(chunked_divergence, "_project", watch)
    monkeypatch.setattr(chunked_divergence, "TOKEN_CHUNK_SIZE", 16)
    assert chunked_divergence.VOCAB_CHUNK_SIZE == distill_trainer.WORDS
    states, head = torch.randn(50, 8, requires_grad=True), Head(torch.randn(40_000, 8), None, 1.0, None)
    divergence(states, head, torch.randn(50, 8), head, 1.0, 1.0)[0].sum().backward()
    assert max(sizes) == (16, 32768) and len(sizes) == 2 * 2 * 4 * 2  # models, tiles of words, of tokens, directions


def test_the_loss_is_that_of_trl_s_distillation_trainer_and_beta_means_the_same():
    torch.manual_seed(0)
    states, target, mask = torch.randn(2, 9, 16), torch.randn(2, 9, 16), torch.rand(2, 9) > 0.3
    weight = torch.randn(120, 16)
    head = Head(weight, None, 1.0, None)
    for kind, b in (("forward_kl", 0.0), ("reverse_kl", 1.0), ("js", 0.3)):
        from kit.core.config.schema import DistillConfig

        assert beta_of(DistillConfig(divergence=kind, js_beta=b or 0.5)) == b
        wanted, entropy, tokens = distillation_trainer._chunked_divergence_loss(
            states, target, weight, weight, mask, b, temperature=1.5
        )
        each, ours = divergence(states[mask], head, target[mask], head, b, 1.5)
        assert torch.allclose(each.mean(), wanted) and torch.allclose(ours.sum(), entropy) and len(each) == tokens


def test_trl_s_own_trainer_still_lacks_what_a_run_needs():
    """Each line is a reason in distill_trainer.py's docstring; when one is gone upstream, look at it again."""
    from trl.generation.vllm_generation import VLLMGeneration  # imports vllm, which collecting this file should not

    assert "merge_adapter()" in inspect.getsource(VLLMGeneration)  # its way to a vLLM server
    assert "logprobs=None" in inspect.getsource(DistillationTrainer.__init__)  # the sampler's are not asked for
    assert "mini_repeat_count=1" in inspect.getsource(DistillationTrainer._get_train_sampler)  # one a prompt
    loss = inspect.getsource(DistillationTrainer._compute_loss)
    assert "self.teacher_model.eval()" in loss and "disable_adapter" not in loss  # a second model
    assert "reward" not in inspect.signature(DistillationTrainer.__init__).parameters
