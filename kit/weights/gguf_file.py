"""Read a GGUF file: validate it, load weights and configuration through transformers, build the tokenizer and estimate
the rounding error of its types.

The tokenizer is built here from the file's tokens and merges: transformers' own conversion (5.17.0) drops the file's
pre-tokenizer, so spaces before digits become other tokens than the model was trained on, and decodes "▁" as a space.
Not covered: tokenizers other than byte-level BPE that splits digits (`smollm`), files in several parts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.errors import BadInput

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

STOP = "<|im_end|>"
CONTROL = 3  # tokenizer.ggml.token_type of special tokens
# Exceptions that the `gguf` package raises for a file that is truncated or of another kind.
DAMAGED = (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError, OSError)


@dataclass(frozen=True)
class Rounding:
    """Estimated rounding error of one kind of weight: the file holds only the size of the quantization step."""

    kind: str  # attn_q, token_embd, …
    type: str  # GGUF's name of the storage type
    tensors: int
    weights: int
    bits: float  # per weight, scales included
    # RMS of an error that is uniform within a step, relative to the RMS of the weights; None: not rounded.
    noise: float | None


def open_gguf(path: Path) -> "GGUFReader":
    """Open the file's fields and tensors; `BadInput` if it is damaged or has a type that gguf cannot dequantize."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except DAMAGED as error:
        raise BadInput(f"{path.name} is truncated or no GGUF file: {error}. Fetch it again.") from None
    _check_types(path, reader)
    return reader


def _check_types(path: Path, reader: "GGUFReader") -> None:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, dequantize

    first = {tensor.tensor_type: tensor.name for tensor in reversed(reader.tensors)}
    for kind, name in first.items():
        try:
            _, row_bytes = GGML_QUANT_SIZES[kind]
            dequantize(np.zeros((1, row_bytes), np.uint8), kind)
        except NotImplementedError:
            raise BadInput(
                f"{path.name} stores {name} as {kind.name}, which transformers cannot read. Take one in Q4_1, Q8_0, "
                "BF16 or another type that the package gguf dequantizes."
            ) from None


def field(reader: "GGUFReader", name: str) -> Any:
    """Value of a metadata field; `BadInput` if the file has none of that name."""
    if (found := reader.get_field(name)) is None:
        raise BadInput(f"the GGUF file has no {name}, which this command needs.")
    return found.contents()


def read_tokenizer(reader: "GGUFReader") -> "PreTrainedTokenizerFast":
    """Build the tokenizer with chat template, stop and pad token; `BadInput` for an unsupported kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise BadInput(f"the GGUF file's tokenizer is {'/'.join(map(str, kind))}; only gpt2/smollm is read here.")
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    if STOP not in special:
        raise BadInput(f"the GGUF file has no special token {STOP}, which ends a turn of its chat template.")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=STOP,
        pad_token=tokens[field(reader, "tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field(reader, "tokenizer.ggml.unknown_token_id")],
        padding_side="left",
        chat_template=field(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=field(reader, f"{field(reader, 'general.architecture')}.context_length"),
    )


def read_model(path: Path, tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedModel":
    """Load the model in BF16, as an unquantized one of its class, with the tokenizer's stop and pad token.

    `BadInput` if transformers does not know the architecture, or a weight is missing or not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        loaded, found = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except (*DAMAGED, RuntimeError) as error:
        raise BadInput(f"transformers cannot read {path.name}: {error}") from None
    if found["missing_keys"]:
        raise BadInput(
            f"{path.name} lacks {len(found['missing_keys'])} weights: {sorted(found['missing_keys'])[0]}, …"
        )
    values = loaded.config.to_dict()
    # Saving refuses while the first is present; the other two were set by the file's author.
    for key in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        values.pop(key, None)
    if "rms_norm_eps" in values:
        values["rms_norm_eps"] = float(f"{values['rms_norm_eps']:.6g}")  # a float32 in the file: 9.999999747e-06
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config)(**{**values, **ids, "dtype": "bfloat16"}))
    state = {name: value.to(torch.bfloat16) for name, value in loaded.state_dict().items()}
    for name, value in state.items():
        if not value.isfinite().all():
            raise BadInput(f"{path.name}: {name} has values that are not finite. Fetch it again.")
    # Rotary frequencies are not in the state dict; only the state dict is saved.
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(**ids)
    return model


def roundings(reader: "GGUFReader") -> list[Rounding]:
    """Rounding error of each kind of weight, in file order; see `Rounding.noise`."""
    groups: dict[tuple[str, str], list[ReaderTensor]] = {}
    for tensor in reader.tensors:
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        groups.setdefault((kind, tensor.tensor_type.name), []).append(tensor)
    return [
        Rounding(
            kind,
            name,
            len(tensors),
            weights := int(sum(tensor.n_elements for tensor in tensors)),
            8 * int(sum(tensor.n_bytes for tensor in tensors)) / weights,
            _noise(tensors),
        )
        for (kind, name), tensors in groups.items()
    ]


def _noise(tensors: "list[ReaderTensor]") -> float | None:
    """sqrt(mean(step²) / 12) over the weights' RMS; None for types without a single step per block."""
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    if tensors[0].tensor_type not in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        return None
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[tensors[0].tensor_type.name]
    steps = weights = 0.0
    for tensor in tensors:
        blocks = np.ascontiguousarray(tensor.data).reshape(-1, block_bytes)
        step = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float64)
        steps += float((step**2).mean()) * int(tensor.n_elements)
        weights += float((dequantize(tensor.data, tensor.tensor_type).astype(np.float64) ** 2).sum())
    return (steps / 12 / weights) ** 0.5
