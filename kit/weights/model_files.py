"""Check an original checkpoint's tensor names against the model that its config.json describes; reads no weights."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kit.core.checkpoint_files import from_files, quantization_of
from kit.core.errors import BadInput
from kit.weights.checkpoint import checkpoint_shards
from kit.weights.layout import parameter_shapes
from kit.weights.plain_linear import plain_linears
from kit.weights.wrapped import is_of_language, language_config, language_name, wrapper_of

# {model_type: {start of a name in the files: in the model}} of families that transformers 5.17 renames on load.
RENAMED = {"gpt_neox": {"embed_out.": "lm_head."}}
# quant_method values that `python -m merge dequantize` reads.
DEQUANTIZED = ("fp8", "compressed-tensors")


def read_config(path: str | Path, revision: str | None = None) -> Any:
    """Read the transformers config of a checkpoint, local or on the hub; `BadInput` if there is none."""
    from transformers import AutoConfig

    return from_files(
        "model config", path, lambda: AutoConfig.from_pretrained(str(path), revision=revision, trust_remote_code=False)
    )


def unquantized_config(path: str | Path, revision: str | None = None) -> Any:
    """Read the transformers config of the causal LM in a checkpoint, local or on the hub; `BadInput` if it is already
    quantized, or wrapped in a way that is not covered (`wrapped.py`)."""
    config = read_config(path, revision)
    if quantized := quantization_of(config):
        method = quantized.get("quant_method")
        raise BadInput(
            f"{path} is quantized already (quantization_config in its config.json, method {method}). A base in nf4 or "
            "fp8 (policy.quantization) is made from the original 16-bit or 32-bit checkpoint: name that one"
            + (f", or what this writes: {dequantize_command(path, revision)}" if method in DEQUANTIZED else ".")
        )
    return language_config(config)


def dequantize_command(path: str | Path, revision: str | None = None) -> str:
    """Command that writes a quantized checkpoint, local or on the hub, in BF16, quoted for the shell."""
    is_local = Path(path).is_dir()
    words = ["python", "-m", "merge", "dequantize", "--model.path" if is_local else "--model.id", str(path)]
    words += ["--model.revision", revision] if revision and not is_local else []
    # A local model may be given as `.` or `..`, which have no usable name.
    name = Path(path).resolve().name if is_local else Path(path).name
    return shlex.join([*words, "--out", f"models/{name}-bf16"])


def context_of(config: Any) -> int | None:
    """Most tokens of a sequence that a model takes, by its transformers config; None without a limit (BLOOM)."""
    facts = config.get_text_config()
    return getattr(facts, "max_position_embeddings", None) or getattr(facts, "max_seq_len", None)


def model_name(config: Any) -> Callable[[str], str]:
    """Return the function from a tensor's name in a checkpoint's files to its name in the model of `config`."""
    if wrapper_of(config):
        return language_name
    renamed = RENAMED.get(config.model_type, {})
    return lambda stored: next(
        (renamed[one] + stored[len(one) :] for one in renamed if stored.startswith(one)), stored
    )


def without_weights(config: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), plain_linears(config):
        return AutoModelForCausalLM.from_config(config)


def output_embedding(config: Any) -> list[str]:
    return _output_of(without_weights(config))


def _output_of(model: torch.nn.Module) -> list[str]:
    output = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is output]


@dataclass(frozen=True)
class Selection:
    """Tensors of a checkpoint's files: the model's, by their names in it, and carried ones, which are not the
    trainer's (`wrapped.py`; buffers) and are copied unchanged into whatever is made of the checkpoint."""

    shards: dict[str, list[str]]  # {file: tensors of the model}
    stored: dict[str, str]  # {tensor of the model: its name in the file}
    carried: dict[str, str]  # {name in the file: file}


def select_shards(
    directory: Path, wanted: set[str], config: Any, complaint: str, listed: dict[str, list[str]] | None = None
) -> Selection:
    """Find the tensors `wanted` of the model of `config` in a checkpoint, or in what is made of its files (`listed`).

    `BadInput`, starting with `complaint`, if a wanted tensor is missing or the checkpoint has any other that is not
    carried. A tied checkpoint may store the output embedding twice; the model has it once. Tensors that transformers
    ignores on load are skipped.
    """
    listed = checkpoint_shards(directory) if listed is None else listed
    rename = model_name(config)
    files = {stored: file for file, names in listed.items() for stored in names}
    stored = {name: one for one in files if (name := rename(one)) in wanted}
    extra = sorted(set(files) - set(stored.values()))
    if extra and getattr(config, "tie_word_embeddings", False):
        extra = [name for name in extra if rename(name).removesuffix(".weight") not in output_embedding(config)]
    carried = set()
    if wrapper_of(config):
        carried = {name for name in extra if not is_of_language(name, wanted)}
    if extra := [name for name in extra if name not in carried]:
        buffers = buffer_names(without_weights(config))
        carried |= {name for name in extra if rename(name) in buffers}
        extra = [name for name in extra if name not in carried]
        if unknown := _unexpected(extra, config):
            raise BadInput(f"{complaint}: it has {unknown[0]}, which the base has not.")
        carried |= set(extra) if wrapper_of(config) else set()  # another reader of the wrapper may want them
    if absent := sorted(wanted - stored.keys()):
        raise BadInput(f"{complaint}: it has no {absent[0]} ({len(absent)} of {len(wanted)}).")
    shards = {file: [name for one in names if (name := rename(one)) in wanted] for file, names in listed.items()}
    return Selection(shards, stored, {name: files[name] for name in sorted(carried)})


def buffer_names(model: torch.nn.Module) -> set[str]:
    """Names of a model's persistent buffers: its checkpoint has them, and they are no parameters."""
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def check_complete(path: str | Path, config: Any) -> None:
    """`BadInput` if the safetensors at `path` lack parameters of the model that its config.json describes:
    transformers would initialize them randomly. Reads only headers, and only of a local checkpoint. A checkpoint that
    also has unknown tensors may store them under older names; only loading can tell (`refuse_made_up`)."""
    if not any(Path(path).glob("*.safetensors")):
        return
    model = without_weights(config)
    wanted = set(parameter_shapes(model))
    rename = model_name(config)
    found = {rename(name) for names in checkpoint_shards(path).values() for name in names}
    if wrapper_of(config):
        found = {name for name in found if is_of_language(name, wanted)}
    known = {f"{name}.weight" for name in _output_of(model)}  # a tied model may store it twice
    if not found - wanted - known:
        refuse_made_up(path, wanted - found, len(wanted))


def check_names(path: str | Path, config: Any) -> None:
    """`BadInput` if the safetensors at `path` use other tensor names than the model that transformers builds from
    them, and not those of a known wrapper: merge reads the files directly and would refuse an adapter trained on it.
    Reads only headers, and only of a local checkpoint."""
    if not any(Path(path).glob("*.safetensors")):
        return
    wanted = set(parameter_shapes(without_weights(config)))
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
