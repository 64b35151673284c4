"""Fields of train.trl that end a run in trl's own error: refused before anything is loaded or written."""

import pytest
from trl import GRPOConfig

from recipes.parts.checks import check_config
from recipes.parts.trl_fields import INSTEAD
from tests.unit.test_checks import configuration, refusal


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ("eval_strategy: steps", "watch.eval_every"),
        ("eval_on_start: true", "watch.eval_every"),
        ("log_completions: true", "watch.completions_every"),
        ("push_to_hub: true", "python -m merge --push_to_hub"),
        ("sync_ref_model: true", "the policy with its adapter off"),
        ("cast_lm_head_to_fp32: true", "model.dtype to float32"),
        ("accelerator_config: {dispatch_batches: true}", "accelerate's part"),
        ("neftune_noise_alpha: 5", "would not be one model"),
        ("torch_compile: true", "policy.kernels liger"),
    ],
)
def test_what_trl_would_refuse_after_the_base_is_recorded_is_refused_before(field, instead):
    said = refusal(train__trl=f"{{{field}}}")
    assert f"train.trl.{field.partition(':')[0]} (" in said and instead in said and said.endswith("Remove it.")


def test_a_field_that_is_off_is_no_problem():
    check_config(
        configuration(train__trl="{log_completions: false, eval_strategy: 'no', logging_first_step: true}"), 1
    )


def test_every_field_is_one_of_trls():
    assert INSTEAD.keys() <= GRPOConfig.__dataclass_fields__.keys()
