"""A run is trained by the recipe of its configuration, and resumed in the format it was trained for, whatever name
policy.quant_cfg has for it, to no fewer steps than it has made."""

import pytest
import yaml

from kit.core.config.recipe import DISTILLATION, PLAIN, QUANTIZED, check_recipe
from kit.core.config.run_checks import check_run_directory
from kit.core.errors import BadInput
from tests.unit.test_checks import configuration, directory_refusal, run_with_checkpoint

FP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}


@pytest.mark.parametrize("name", ["NVFP4_DEFAULT_CFG", "a.yaml"])
def test_a_run_resumes_under_another_name_of_its_format(tmp_path, name):
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump({"quant_cfg": {"*weight_quantizer": FP4, "*input_quantizer": FP4}})
    )
    name = str(tmp_path / name) if name.endswith("yaml") else name
    for number, (before, now) in enumerate((("nvfp4", name), (name, "nvfp4"))):
        folder = tmp_path / str(number)
        run_with_checkpoint(folder, configuration(policy__quant_cfg=before), quant_cfg="nvfp4")
        check_run_directory(configuration(run__output_dir=folder, policy__quant_cfg=now), resume=True, processes=1)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("nvfp4", "fp8", "was trained for nvfp4, policy.quant_cfg is fp8 now. Resume with policy.quant_cfg nvfp4, or"),
        ("fp8", "NVFP4_DEFAULT_CFG", "was trained for fp8, policy.quant_cfg NVFP4_DEFAULT_CFG is nvfp4 now"),
        ("nvfp4", None, "was trained for nvfp4, policy.quant_cfg is not set now"),
        (None, "fp8", "was trained for no format, policy.quant_cfg is fp8 now. Resume with policy.quant_cfg left out"),
    ],
)
def test_a_run_does_not_resume_in_another_format(tmp_path, before, now, message):
    given, wanted = ({"policy__quant_cfg": name} if name else {} for name in (before, now))
    fields = {"quant_cfg": before} if before else {}
    run_with_checkpoint(tmp_path / "run", configuration(**given), **fields)
    assert message in directory_refusal(configuration(run__output_dir=tmp_path / "run", **wanted), resume=True)


@pytest.mark.parametrize(
    ("recipe", "changes", "complaint"),
    [
        (QUANTIZED, {}, "policy.quant_cfg is not set: recipes/grpo_qat.py .* Start it with recipes/grpo_qlora.py, or"),
        (PLAIN, {"policy__quant_cfg": "fp8"}, "quant_cfg is fp8: .* Start it with recipes/grpo_qat.py, or leave"),
        (PLAIN, {"distill__teacher": "base"}, "distill.teacher is base: .* Start it with recipes/distill_qat.py"),
        (DISTILLATION, {}, "distill.teacher and distill.teacher_adapter are not set: .*grpo_qlora.py, or set one"),
        (DISTILLATION, {"policy__quant_cfg": "fp8"}, "teacher_adapter are not set: .*recipes/grpo_qat.py, or set one"),
    ],
)
def test_a_recipe_started_with_the_configuration_of_another_says_what_it_lacks(recipe, changes, complaint):
    with pytest.raises(BadInput, match=complaint):
        check_recipe(configuration(**changes), recipe)


def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_made(tmp_path):
    config = configuration(run__output_dir=tmp_path / "run", train__max_steps=9)
    run_with_checkpoint(tmp_path / "run", config, steps=(4, 6))
    config.train.max_steps = 6
    check_run_directory(config, resume=True, processes=1)
    config.train.max_steps = 5
    assert directory_refusal(config, resume=True).endswith("has made 6 steps, train.max_steps is 5. Raise it.")
