"""Fields of train.trl that the kit does not pass on to trl: refused before anything is loaded or written."""

import pytest
from trl import GRPOConfig

from kit.core.config.checks import check_config
from kit.core.config.trl_rules import (
    FLOOR_FIELD,
    INEXACT_ON_RESUME,
    INSTEAD,
    OWN_GENERATION_FIELDS,
    SAMPLER_FIELDS,
    SHARDING_FIELDS,
    WHOLE_BATCH_FIELDS,
)
from tests.unit.test_checks import configuration, refusal


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ("eval_strategy: steps", "watch.eval_every"),
        ("eval_on_start: true", "watch.eval_every"),
        ("log_completions: true", "watch.completions_every"),
        ("push_to_hub: true", "python -m merge --push_to_hub"),
        ("sync_ref_model: true", "policy.reference names the reference"),
        ("cast_lm_head_to_fp32: true", "model.dtype to float32"),
        ("accelerator_config: {dispatch_batches: true}", "how accelerate splits"),
        ("neftune_noise_alpha: 5", "would not be one model"),
        ("torch_compile: true", "policy.kernels fused"),
        ("torch_compile_backend: inductor", "policy.kernels fused"),
        ("torch_compile_mode: default", "policy.kernels fused"),
        ("use_liger_kernel: true", "policy.kernels liger"),
        ("use_transformers_continuous_batching: true", "casts the adapter"),
        ("use_transformers_paged: true", "casts the adapter"),
        ("logging_strategy: 'no'", "checked for NaN"),
        ("logging_strategy: epoch", "checked for NaN"),
        ("steps_per_generation: 4", "could not be resumed exactly"),
        ("steps_per_generation: 0", "could not be resumed exactly"),
        ("save_only_model: true", "could not be resumed exactly"),
    ],
)
def test_what_trl_would_refuse_after_the_base_is_recorded_is_refused_before(field, instead):
    said = refusal(train__trl=f"{{{field}}}")
    assert f"train.trl.{field.partition(':')[0]} (" in said and instead in said and said.endswith("Remove it.")


def test_an_unknown_level_of_the_ratio_is_refused_before_the_first_step():
    check_config(configuration(train__trl="{importance_sampling_level: sequence}"), 1)
    said = refusal(train__trl="{importance_sampling_level: row}")
    assert said == "train.trl.importance_sampling_level is 'row'. Use token or sequence."


def test_a_field_that_is_off_is_no_problem():
    off = "log_completions: false, eval_strategy: 'no', use_liger_kernel: false, logging_strategy: steps"
    check_config(configuration(train__trl=f"{{{off}}}"), 1)


def test_every_field_is_one_of_trls():
    fields = GRPOConfig.__dataclass_fields__
    named = (INSTEAD, INEXACT_ON_RESUME, SHARDING_FIELDS, SAMPLER_FIELDS, OWN_GENERATION_FIELDS, WHOLE_BATCH_FIELDS)
    assert {FLOOR_FIELD}.union(*named) <= fields.keys()
    for name, off in (SAMPLER_FIELDS | WHOLE_BATCH_FIELDS).items():
        assert fields[name].default in off
