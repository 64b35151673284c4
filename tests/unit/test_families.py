"""Dense decoder families: two steps of GRPO, every format, every lever; the table in recipes/README.md."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kit.core.errors import BadInput
from kit.core.formats import find_experts
from kit.policy.load import READS_PADDING
from kit.weights.base_dropout import clear_dropout_rates
from kit.weights.frozen_base import load_frozen, stored_linears
from kit.weights.model_files import RENAMED, context_of, without_weights
from kit.weights.plain_linear import OWN_LINEARS, check_linears
from kit.weights.wrapped import LANGUAGE
from kit.weights.write_base import plan_base
from tests.conftest import ROOT, run_here
from tests.unit.families import FAMILIES, OTHERS, family_config, make_family, show

# Those with a path of their own: layers that are no torch.nn.Linear; a buffer; no positions and no sdpa.
IN_CI = ("falcon", "apertus", "bloom")
SECTION = (ROOT / "recipes" / "README.md").read_text().split("\n## Models\n")[1].split("\n### ")[0]
ROWS = {
    line.split("`")[1]: line
    for line in SECTION.splitlines()
    if line.startswith("| `") and line.count("|") == 6 and "model_type" not in line
}
CASES = [pytest.param(one, marks=[] if one in IN_CI else pytest.mark.sweep) for one in FAMILIES]


@pytest.mark.parametrize("family", CASES)
def test_the_table_says_what_the_path_shows(family, tmp_path, recipe):
    shown = show(family, tmp_path, recipe, run_here)
    assert shown.row() == ROWS[family], shown.refused


def test_every_family_of_transformers_has_a_row_or_a_reason():
    assert set(ROWS) == set(FAMILIES) and set(IN_CI) <= set(ROWS)
    known = {*FAMILIES, *LANGUAGE, *(one for names in OTHERS.values() for one in names)}
    left = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known
    dense = [one for one in sorted(left) if not find_experts(AutoConfig.for_model(one).to_dict())]
    assert dense == [], "new in transformers: give it a row, or a reason in OTHERS"
    assert set(READS_PADDING) <= set(OTHERS["recurrent"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_a_family_is_stored_in_nf4_and_every_rename_is_known(family):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    config = family_config(family)
    check_linears(blank := without_weights(config), family)
    if family in OWN_LINEARS:
        with torch.device("meta"), pytest.raises(BadInput, match=f"of {family} are {OWN_LINEARS[family]}"):
            check_linears(AutoModelForCausalLM.from_config(config), family)
    assert {f"{name}.weight" for name in stored_linears(blank)} == set(plan_base(config).quantized)
    renamed = get_checkpoint_conversion_mapping(type(blank).__name__) or []
    assert len(renamed) == len(RENAMED.get(family, {}))
    clear_dropout_rates(config)
    assert all(value == 0 for name, value in vars(config).items() if "drop" in name and isinstance(value, int | float))


@torch.no_grad()
def test_a_loaded_pad_token_keeps_its_embedding(tmp_path):
    """transformers' own `_init_weights` of Youtu sets it to 0 after it was loaded."""
    make_family(tmp_path, "youtu")
    pad = family_config("youtu").pad_token_id
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight[pad]
    ours = load_frozen(tmp_path, "none", "float32", device="cpu").get_input_embeddings().weight[pad]
    assert not theirs.any(), "fixed upstream: kit/weights/initialization.py may go"
    assert ours.any()


def test_models_without_a_limit_of_positions_have_a_context():
    contexts = {family: context_of(family_config(family)) for family in ("llama", "gptj", "mpt", "bloom")}
    assert contexts == {"llama": 512, "gptj": 512, "mpt": 512, "bloom": None}
