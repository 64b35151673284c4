"""The plan of a configuration on its cards, and whether it fits."""

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.plan.decoder import Shape
from kit.plan.fitting import Layout, check_keys, lay_out
from kit.plan.gpus import Card, parse_gpus
from kit.plan.shapes import config_shape, find_shape, shape_by_size
from kit.plan.sizes import Facts


def choose_shape(config: Config, params: str | None = None, model: str | None = None) -> Shape:
    """The shape that the command line names, or else that of the configuration's model."""
    if params is not None and model is not None:
        raise BadInput(f"--params {params} and --model {model} both name the model. Give one.")
    if params is not None:
        return shape_by_size(params)
    return find_shape(model) if model is not None else config_shape(config)


def make_layout(config: Config, shape: Shape, card: Card, count: int) -> Layout:
    """Plan a configuration on its cards; raises `BadInput` for keys that the recipe refuses, and for too few cards."""
    check_keys(config, card, count)
    return lay_out(shape, config, card, count)


def fits(config: Config, model_config: Facts | None = None, gpus: str = "auto") -> tuple[bool, str]:
    """Whether a run fits, and a summary of a few lines.

    `model_config` is the model's config.json if it was read already; `gpus` has the form of --gpu. Raises `BadInput`
    if the model or the cards are unknown.
    """
    from kit.plan.report import summary

    layout = make_layout(config, config_shape(config, model_config), *parse_gpus(gpus))
    return layout.fits, summary(layout)
