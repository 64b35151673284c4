"""Check an original checkpoint's tensor names against the model that its config.json describes; reads no weights."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kit.core.checkpoint_files import quantization_of
from kit.core.errors import BadInput
from kit.weights.checkpoint import checkpoint_shards, pass_full_disk
from kit.weights.layout import parameter_shapes

# quant_method values that `python -m merge dequantize` reads.
DEQUANTIZED = ("fp8", "compressed-tensors")


def read_config(path: str | Path, revision: str | None = None) -> Any:
    """Read the transformers config of a checkpoint, local or on the hub; `BadInput` if there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), revision=revision)
    except (OSError, ValueError) as error:
        pass_full_disk(error)
        raise BadInput(f"no model config at {path}: {str(error).splitlines()[0]}") from None


def unquantized_config(path: str | Path, revision: str | None = None) -> Any:
    """Read the transformers config of a checkpoint, local or on the hub; `BadInput` if it is already quantized."""
    config = read_config(path, revision)
    if quantized := quantization_of(config):
        method = quantized.get("quant_method")
        raise BadInput(
            f"{path} is quantized already (quantization_config in its config.json, method {method}). A base in nf4 or "
            "fp8 (policy.quantization) is made from the original 16-bit or 32-bit checkpoint: name that one"
            + (f", or what this writes: {dequantize_command(path, revision)}" if method in DEQUANTIZED else ".")
        )
    return config


def dequantize_command(path: str | Path, revision: str | None = None) -> str:
    """Command that writes a quantized checkpoint, local or on the hub, in BF16, quoted for the shell."""
    is_local = Path(path).is_dir()
    words = ["python", "-m", "merge", "dequantize", "--model.path" if is_local else "--model.id", str(path)]
    words += ["--model.revision", revision] if revision and not is_local else []
    # A local model may be given as `.` or `..`, which have no usable name.
    name = Path(path).resolve().name if is_local else Path(path).name
    return shlex.join([*words, "--out", f"models/{name}-bf16"])


def without_weights(config: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def output_embedding(config: Any) -> list[str]:
    return _output_of(without_weights(config))


def _output_of(model: torch.nn.Module) -> list[str]:
    output = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is output]


def select_shards(
    directory: Path, wanted: set[str], config: Any, complaint: str, listed: dict[str, list[str]] | None = None
) -> dict[str, list[str]]:
    """Return {shard file: its tensors among `wanted`} of a checkpoint, or of what is made of its files (`listed`).

    `BadInput`, starting with `complaint`, if a wanted tensor is missing or the checkpoint has any other. A tied
    checkpoint may store the output embedding twice; the model has it once. Tensors that transformers ignores on load
    are skipped.
    """
    listed = checkpoint_shards(directory) if listed is None else listed
    shards = {file: [name for name in names if name in wanted] for file, names in listed.items()}
    found = {name for names in listed.values() for name in names}
    extra = sorted(found - wanted)
    if extra and getattr(config, "tie_word_embeddings", False):
        extra = [name for name in extra if name.removesuffix(".weight") not in output_embedding(config)]
    if extra and (extra := _unexpected(extra, config)):
        raise BadInput(f"{complaint}: it has {extra[0]}, which the base has not.")
    if absent := sorted(wanted - found):
        raise BadInput(f"{complaint}: it has no {absent[0]} ({len(absent)} of {len(wanted)}).")
    return shards


def check_complete(path: str | Path, config: Any) -> None:
    """`BadInput` if the safetensors at `path` lack parameters of the model that its config.json describes:
    transformers would initialize them randomly. Reads only headers, and only of a local checkpoint. A checkpoint that
    also has unknown tensors may store them under older names; only loading can tell (`refuse_made_up`)."""
    if not any(Path(path).glob("*.safetensors")):
        return
    model = without_weights(config)
    wanted = set(parameter_shapes(model))
    found = {name for names in checkpoint_shards(path).values() for name in names}
    known = {f"{name}.weight" for name in _output_of(model)}  # a tied model may store it twice
    if not found - wanted - known:
        refuse_made_up(path, wanted - found, len(wanted))


def check_names(path: str | Path, config: Any) -> None:
    """`BadInput` if the safetensors at `path` use other tensor names than the model that transformers builds from
    them, as vision-language models do: merge reads the files directly and would refuse an adapter trained on it.
    Reads only headers, and only of a local checkpoint."""
    if not any(Path(path).glob("*.safetensors")):
        return
    model = without_weights(config)
    buffers = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted = set(parameter_shapes(model)) | buffers
    what = (
        f"{path} ({config.model_type}) is laid out otherwise than its model, so merge could not take what is trained"
    )
    select_shards(Path(path), wanted, config, what)


def refuse_made_up(path: str | Path, absent: Iterable[str], count: int) -> None:
    """`BadInput` if any of the model's `count` parameters is in `absent`: random weights are no base."""
    if names := sorted(absent):
        raise BadInput(
            f"{path} has no {names[0]} ({len(names)} of {count} parameters of the model that its config.json "
            "describes): they would be random. Name a whole checkpoint."
        )


def _unexpected(names: list[str], config: Any) -> list[str]:
    """Names, none of them a parameter, that transformers 5.17 would report as unexpected: a model's own patterns hide
    the rest (the rotary frequencies of early Llama checkpoints, layers for multi-token prediction)."""
    keys = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    without_weights(config)._adjust_missing_and_unexpected_keys(keys)
    return sorted(keys.unexpected_keys)
