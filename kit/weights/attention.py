"""Choose the attention kernel of a model (`model.attn_implementation`)."""

from typing import Any

from kit.core.errors import BadInput

AUTO = "auto"
# Cap of attention scores (Gemma 2, VaultGemma). transformers 5.17 passes it to every kernel, and sdpa silently ignores
# it: its log-probs are those of another model.
SOFT_CAP = "attn_logit_softcapping"


def attention_of(config: Any, asked: str = AUTO) -> str:
    """Name of transformers' attention kernel for a model with the transformers config `config`.

    `auto` is sdpa where the model has it and eager elsewhere. `BadInput` for sdpa where it would leave out the soft
    cap. Whether transformers can build the model with another kernel is not checked.
    """
    cap = getattr(config.get_text_config(), SOFT_CAP, None)
    if asked == "sdpa" and cap:
        raise BadInput(
            f"model.attn_implementation sdpa does not apply this model's {SOFT_CAP} ({cap:g}), so its log-probs would "
            "not be the model's. Use auto or eager."
        )
    if asked != AUTO:
        return asked
    from kit.weights.model_files import without_weights

    return "eager" if cap else without_weights(config).config._attn_implementation
