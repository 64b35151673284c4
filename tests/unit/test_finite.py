"""What is not finite stops a run: whichever tensor, entry and sign it is in, and never what is finite."""

from types import SimpleNamespace

import pytest
import torch

from kit.core.errors import CheckFailed
from kit.train.finite import FiniteAdapter, FiniteGradients, spoiled
from kit.train.loss_scale import LossScale

STATE = SimpleNamespace(global_step=4)
VALUES = [float("nan"), float("inf"), float("-inf")]


@pytest.fixture
def model():
    """Two frozen tensors of a base around three of an adapter; the adapter's have gradients."""
    made = torch.nn.ParameterList([torch.full((3, 2), 0.5) for _ in range(5)])
    for place, parameter in enumerate(made):
        parameter.requires_grad = place in (1, 2, 3)
        parameter.grad = torch.full((3, 2), 1e15) if parameter.requires_grad else None
    return made


def look(callback, event: str, model) -> None:
    getattr(callback, event)(None, STATE, None, model=model)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_one_entry_of_any_gradient_that_is_not_finite_keeps_the_step_and_stops_the_run(model, place, value):
    kept = []
    callback = FiniteGradients(lambda: kept.append(True) or "Its rows are in X.")
    look(callback, "on_pre_optimizer_step", model)
    assert not kept
    model[place].grad[2, 1] = value
    with pytest.raises(CheckFailed, match=r"^step 5: the gradient is not finite.* Its rows are in X\. Continue with"):
        look(callback, "on_pre_optimizer_step", model)
    assert kept == [True]


def test_an_overflow_at_a_loss_scale_stops_the_run_once_the_scale_cannot_fall(model):
    scaler, figures, said = torch.amp.GradScaler("cpu", init_scale=4.0), SimpleNamespace(values={}), []
    callback = FiniteGradients(lambda: "Kept.", LossScale(scaler, figures, said.append))
    look(callback, "on_pre_optimizer_step", model)
    assert figures.values == {"loss_scale": 4.0, "update_skipped": 0} and not said
    model[1].grad[0, 0] = torch.inf
    for scale in (4.0, 2.0):
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
        look(callback, "on_pre_optimizer_step", model)
        assert figures.values == {"loss_scale": scale, "update_skipped": 1}
    assert len(said) == 2 and said[1].startswith("step 5: the gradient overflowed float16 at a loss scale of 2.")
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1.0})
    with pytest.raises(CheckFailed, match=r"the gradient is not finite, at the lowest loss scale \(1\) too.* Kept\."):
        look(callback, "on_pre_optimizer_step", model)


def test_an_adapter_that_part_of_a_step_left_without_gradient_is_looked_at(model):
    model[1].grad = None
    model[3].grad[0, 0] = torch.nan
    with pytest.raises(CheckFailed, match="the gradient is not finite"):
        look(FiniteGradients(str), "on_pre_optimizer_step", model)
    for parameter in model:
        parameter.grad = None
    look(FiniteGradients(str), "on_pre_optimizer_step", model)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("on_train_begin", "^2 of 3 tensors of the adapter that training starts from are not finite"),
        ("on_optimizer_step", "^step 5: 2 of 3 tensors of the adapter are not finite after the update"),
    ],
)
def test_an_adapter_that_is_not_finite_neither_starts_nor_goes_on(model, event, said, value):
    look(FiniteAdapter(), event, model)
    for place in (2, 3):
        model[place].data[1, 0] = value
    with pytest.raises(CheckFailed, match=said):
        look(FiniteAdapter(), event, model)


def test_the_base_is_not_counted_among_the_adapters_tensors(model):
    model[0].data[0, 0] = torch.nan
    assert spoiled(model) == ""
    model[1].data[0, 0] = torch.inf
    assert spoiled(model) == "1 of 3 tensors of the adapter"
