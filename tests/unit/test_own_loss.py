"""`train.loss: module:function`: the example of kit/README.md, what is refused before weights load, and at a step."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from kit.core.config.distill_rules import faults
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir
from kit.train.figures import StepFigures
from kit.train.loss import LossSettings, compute_loss, dapo
from kit.train.own_loss import LossFailed, OwnLoss, example_inputs, load_loss
from kit.train.step import PolicyStep
from launch.export.translate import Cluster, translate
from tests.conftest import CONFIG
from tests.sandbox import ROOT
from tests.unit.test_loss import micro_batch, settings_of, to_inputs

(EXAMPLE,) = re.findall(r"```python\n(.*?)```", (ROOT / "kit/README.md").read_text(), re.DOTALL)
MODULE = """
import torch
from kit.train import loss

def same(inputs, settings): return loss.dapo(inputs, settings)
def with_figures(inputs, settings):
    return loss.dapo(inputs, settings), {"mine": inputs.logps, "rows": inputs.advantages}
def with_default(inputs, settings, scale=2.0): return scale * inputs.logps.sum()
def one_argument(inputs): return inputs.logps.sum()
def three(inputs, settings, scale): return inputs.logps.sum()
def number(inputs, settings): return 1.0
def nothing(inputs, settings): pass
def by_row(inputs, settings): return inputs.logps.sum(dim=1)
def detached(inputs, settings): return inputs.logps.detach().sum()
def entropy(inputs, settings): return inputs.entropies.sum()
def listed(inputs, settings): return inputs.logps.sum(), ["mine"]
def wrong_shape(inputs, settings): return inputs.logps.sum(), {"mine": torch.ones(3, 4, 5)}
def plain_figure(inputs, settings): return inputs.logps.sum(), {"mine": 0.5}
def reference(inputs, settings): return (inputs.logps - inputs.ref_logps).sum()
def sampler(inputs, settings): return (inputs.logps - inputs.sampler_logps).sum()
async def waits(inputs, settings): return inputs.logps.sum()
word = "no function"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """own(function, changes): what `load_loss` gives for a function of a module in the current directory."""
    (tmp_path / "kit_own_losses.py").write_text(MODULE)
    (tmp_path / "kit_example_loss.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    for name in ("kit_own_losses", "kit_example_loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def load(name: str, *changes: str, beta: float = 0.0, module: str = "kit_own_losses"):
        config = load_config(CONFIG, [f"--train.loss={module}:{name}", *changes])
        return load_loss(config, LossSettings(beta=beta))

    return load


def test_the_example_of_the_page_is_cispo(own):
    function = own("cispo", module="kit_example_loss")
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 10
    batch = micro_batch("truncated")
    for correction in ("none", "token_truncate"):
        settings = settings_of("dapo", epsilon_high=0.1, beta=0.05, correction=correction)
        inputs = to_inputs(batch, settings)
        loss, figures = compute_loss(inputs, settings, function)
        ratio = (inputs.logps - inputs.old_logps).exp().detach()
        each = -ratio.clamp(max=1.1) * batch["advantages"][:, None] * inputs.logps
        if correction != "none":
            each = each * (inputs.old_logps - inputs.sampler_logps).exp().clamp(max=1.3)
        off = inputs.ref_logps - inputs.logps
        each = each + 0.05 * (off.exp() - off - 1)
        wanted = each[inputs.mask.bool()].mean()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        found, slope = (torch.autograd.grad(one, inputs.logps)[0] for one in (loss, wanted))
        torch.testing.assert_close(found, slope)
        assert figures.read()["clip_ratio/region_mean"] > 0


def test_without_one_the_kits_is_taken():
    assert load_loss(load_config(CONFIG), LossSettings()) is None


@pytest.mark.parametrize("name", ["same", "with_figures", "with_default"])
def test_a_function_of_two_arguments_is_taken(own, name):
    inputs = example_inputs(LossSettings(), is_served=True)
    function = own(name)
    loss, figures = compute_loss(inputs, LossSettings(), function)
    assert loss.requires_grad and ("mine" in figures.read()) == (name == "with_figures")
    if name != "with_default":
        assert loss.item() == dapo(inputs, LossSettings()).item()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_argument", "must take two arguments, inputs and settings"),
        ("three", "must take two arguments, inputs and settings: missing a required argument: 'scale'"),
        ("number", "returned a float. Return a scalar tensor"),
        ("nothing", "returned a NoneType"),
        ("by_row", r"returned a tensor of shape (2,). Return a scalar"),
        ("detached", "returned a loss without a gradient"),
        ("entropy", "does not use inputs.logps"),
        ("listed", "returned metrics as a list"),
        ("wrong_shape", "returned the metric 'mine', which is not a tensor of shape (2, 3)"),
        ("plain_figure", "returned the metric 'mine'"),
        ("reference", "raised TypeError"),  # beta is 0
        ("sampler", "raised TypeError"),  # no server
        ("waits", "is async"),
        ("word", "is a str, not a function"),
        ("missing", "cannot be imported: AttributeError"),
    ],
)
def test_a_function_that_is_no_loss_is_refused_before_weights_load(own, name, said):
    with pytest.raises(BadInput, match=f"^train.loss 'kit_own_losses:{name}' .*{re.escape(said)}"):
        own(name)


def test_what_a_run_has_is_there_when_the_function_is_tried(own):
    assert isinstance(own("reference", beta=0.05), OwnLoss)
    assert isinstance(own("sampler", "--rollout.backend=server"), OwnLoss)


@pytest.mark.parametrize(
    ("name", "said"),
    [("no_such_module:loss", "cannot be imported: ModuleNotFoundError"), ("cispo", "Name a function as module:fu")],
)
def test_a_name_that_leads_nowhere_is_refused(name, said):
    with pytest.raises(BadInput, match=f"train.loss .*'{name}'.*{said}"):
        load_loss(load_config(CONFIG, [f"--train.loss={name}"]), LossSettings())


def test_a_function_that_fails_at_a_step_is_named_with_the_step_and_its_traceback_is_in_the_log(tmp_path):
    def torn(inputs, settings):
        raise KeyError("its own fault")

    mask, logps = torch.ones(2, 3), torch.zeros(2, 3, requires_grad=True)
    rows = {"completion_mask": mask, "advantages": torch.ones(2)}
    policy = SimpleNamespace(processes=SimpleNamespace(num_processes=1), model=torch.nn.Linear(1, 1), version=6)
    (run := RunDir(tmp_path)).logs.mkdir(parents=True)
    for name, function, said in (
        ("mine:torn", torn, r"raised KeyError: 'its own fault'\. Trace"),
        ("mine:number", lambda inputs, settings: 0.0, "returned a float"),
    ):
        facts = (load_config(CONFIG), run, policy, None, LossSettings(), OwnLoss(name, function))
        made = PolicyStep(*facts, StepFigures(torch.device("cpu")), {})
        made.score = lambda model, rows: (logps, logps.detach())
        with pytest.raises(CheckFailed, match=rf"^step 7: train.loss '{name}' {said}"):
            made.loss_of_rows(None, rows, 2, mask.sum())
    assert "in torn" in (run.logs / "trainer.log").read_text()


def test_an_error_that_the_function_raises_on_purpose_is_its_own():
    def refuse(inputs, settings):
        raise CheckFailed("said on purpose")

    with pytest.raises(CheckFailed, match=r"^said on purpose$") as raised:
        OwnLoss("mine:refuse", refuse)(example_inputs(LossSettings(), True), LossSettings())
    assert not isinstance(raised.value, LossFailed)


def test_a_loss_is_refused_where_it_would_have_no_effect(tmp_path):
    config = load_config(CONFIG, ["--train.loss=mine:loss", "--distill.teacher=base"])
    assert any(one.startswith("train.loss is mine:loss in a distillation") for one in faults(config))
    config = load_config(CONFIG, ["--train.loss=mine:loss"])
    with pytest.raises(BadInput, match=r"train\.loss is mine:loss: verl has its own losses only"):
        translate(config, Cluster(1, 8), 1, False, tmp_path)
