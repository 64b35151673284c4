"""An adapter's directory, whoever trained it: what its files say, and its way into a run directory.

Covers adapters that runs of this kit published (manifest.json) and plain ones, as peft, TRL, Unsloth and axolotl save
them: adapter_config.json and adapter_model.safetensors. A plain adapter has no manifest, so no hash shows which base
it was trained on, only a name. `python -m merge import` and a run that starts from a plain adapter copy it into the
run directory and write its manifest there; the directory itself stays as it is.
Not covered: pickled weights (adapter_model.bin), and what `kit.core.lora.reasons` names.
"""

from pathlib import Path

from kit.core import lora
from kit.core.checkpoint_files import read_header
from kit.core.errors import BadInput
from kit.core.file_kinds import ADAPTER_CONFIG
from kit.core.run_directory import (
    check_adapter_file,
    file_hash,
    is_plain_adapter,
    publish,
    read_manifest,
    write_json,
    write_manifest,
)
from kit.core.run_files import read_object
from kit.weights.wrapped import language_name

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of module names in an adapter's file
# Ends of the names of 4-bit copies of a model on the hub: the adapter's base has the name without them.
FOUR_BIT = ("-unsloth-bnb-4bit", "-bnb-4bit", "-4bit", "-nf4")


def adapter_facts(directory: Path) -> dict:
    """Return the manifest of an adapter; for a plain one the same facts from its adapter_config.json, with the base
    hash None. `BadInput` if it is damaged, or not what adding s·B·A describes."""
    directory = Path(directory)
    if is_plain_adapter(directory):
        return {"version": None, "base_hash": None, **_shape(read_plain(directory))}
    manifest = read_manifest(directory, "adapter", deep=True)
    check_adapter_file(directory, manifest)
    return manifest


def read_plain(directory: Path) -> dict:
    """Return the adapter_config.json of a plain adapter; `BadInput` if the kit cannot use the adapter."""
    config = read_object(directory / CONFIG, ADAPTER_CONFIG)
    if why := lora.reasons(config):
        raise BadInput(f"{directory} is not an adapter that this kit can use: {'; '.join(why)}.")
    if beside := _weights_beside(directory):
        raise BadInput(f"{directory} is not the whole of what was trained: {beside}.")
    if not (directory / WEIGHTS).is_file():
        if (directory / PICKLED).is_file():
            raise BadInput(
                f"{directory} has its weights as {PICKLED}, a pickle, which can run any code when it is read. If you "
                f"trust it, load it with peft and save it with save_pretrained, which writes {WEIGHTS}."
            )
        raise BadInput(
            f"{directory} has {CONFIG} and no {WEIGHTS}: it is no whole adapter. Save it again; shards of FSDP have "
            "to be merged by the program that wrote them."
        )
    patterns = [*(config.get("rank_pattern") or {}), *(config.get("alpha_pattern") or {})]
    if odd := [pattern for pattern in patterns if "language_model" in pattern]:
        raise BadInput(
            f"{directory / CONFIG}: rank_pattern or alpha_pattern has {odd[0]!r}, a name of a whole vision-language "
            "model, and only its language model is used here. Write the patterns from `layers` on."
        )
    return config


def _weights_beside(directory: Path) -> str | None:
    """Trained weights that a program keeps outside the adapter's own files; None if there are none."""
    if (directory / "vit.safetensors").is_file():  # ms-swift's tuner_type lora_llm
        return "vit.safetensors holds a vision tower that was trained in full, and only LoRA factors are merged"
    # axolotl's ReLoRA: checkpoint-500/relora beside the checkpoint's own adapter, or beside checkpoint-500/adapter.
    folders = [one for one in (directory, directory.resolve().parent) if one == directory or "checkpoint-" in one.name]
    if any((folder / "relora").is_dir() for folder in folders):
        return "relora holds the base after earlier merges of ReLoRA, on which these factors were trained"
    return None


def language_key(name: str) -> str:
    """Name that a tensor of an adapter on a vision-language model has in an adapter on its language model."""
    return PREFIX + language_name(name.removeprefix(PREFIX))


def factor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return {name in the file: shape} of an adapter's tensors; `BadInput` if the file is damaged."""
    try:
        tensors = read_header(Path(directory) / WEIGHTS).tensors
    except (OSError, ValueError) as error:
        raise BadInput(f"{directory} is damaged: {WEIGHTS} cannot be read ({error}).") from None
    return {name: shape for name, (_, shape) in tensors.items()}


def named_base(directory: Path) -> str | None:
    """Name of the base in an adapter's adapter_config.json; None if it has none."""
    return read_object(Path(directory) / CONFIG, ADAPTER_CONFIG).get("base_model_name_or_path") or None


def is_four_bit(name: str) -> bool:
    """Whether a model's name is that of a 4-bit copy."""
    return name.lower().endswith(FOUR_BIT)


def is_same_model(one: str, other: str) -> bool:
    """Whether two names, hub ids or directories, say the same model: by their last parts, 4-bit copies included."""
    return _last(one) == _last(other)


def _last(name: str) -> str:
    last = (Path(name).resolve() if Path(name).is_dir() else Path(name)).name.lower()
    for end in FOUR_BIT:
        last = last.removesuffix(end)
    return last


def _shape(config: dict) -> dict:
    """Entries of a manifest that describe an adapter's shape and scale, from its adapter_config.json."""
    targets = config.get("target_modules") or []
    return {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "rslora": bool(config.get("use_rslora")),
        "targets": sorted(targets) if isinstance(targets, list) else [targets],
    }


def import_adapter(directory: Path, final: Path, version: int, base_hash: str, is_wrapped: bool) -> Path:
    """Copy a plain adapter to `final` with a manifest, all or nothing, and return `final`.

    `base_hash` is that of the base that the adapter is said to belong to. If a vision-language model wraps the base
    (`is_wrapped`), the copy has the names of the language model. `BadInput` if a value is not finite, or if
    `final` exists.
    """
    from safetensors.torch import load_file, save_file

    from kit.weights.hashing import hash_pairs, hash_tensor

    config = read_plain(directory)
    with publish(final) as partial:
        # Without the copies of base weights that peft adds for an adapted embedding.
        stored = {name: one for name, one in load_file(directory / WEIGHTS).items() if ".lora_" in name}
        tensors = {language_key(name) if is_wrapped else name: one for name, one in stored.items()}
        if tensors.keys() != stored.keys():  # the names and expressions of the config are of the whole model
            names = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
            config |= {"target_modules": sorted(names), "exclude_modules": None}
            config |= {"layers_to_transform": None, "layers_pattern": None}
        write_json(partial / CONFIG, config)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        if odd := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None):
            raise BadInput(f"{directory}: {odd} holds values that are not finite. Name another adapter.")
        write_manifest(
            partial,
            "adapter",
            version=version,
            step=version,
            base_hash=base_hash,
            **_shape(config),
            tensor_hash=hash_pairs({name: hash_tensor(tensor) for name, tensor in tensors.items()}),
            imported_from={
                "path": str(directory.resolve()),
                "blake2b": file_hash(directory / WEIGHTS),
                "base": config.get("base_model_name_or_path"),
                "peft_version": config.get("peft_version"),
            },
        )
    return final
