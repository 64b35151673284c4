"""Write the dequantized NF4 base before a run starts: what a rollout server should hold.

The trainer computes with dequantized NF4 weights. A server that holds the original ones samples from a policy about
9 % of weight error away; one that holds this checkpoint (in BF16, or quantized to FP8 by vLLM as it loads) does not.
"""

import argparse
from pathlib import Path

from merge.base import BaseCheckpoint, find_checkpoint, hash_nf4_model, load_nf4, unquantized_config
from merge.merge import write_bf16
from merge.verify import release_memory
from recipes.parts.config import Config, load_config
from recipes.parts.errors import DONE, BadInput
from recipes.parts.rundir import read_json, read_manifest, write_json


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m merge base", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="YAML of the run; its model and policy groups are read")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; a whole one is reused")
    parser.add_argument("--dry_run", action="store_true", help="check the input, write nothing")
    arguments, overrides = parser.parse_known_args(argv)
    config = load_config(arguments.config, overrides)
    if config.model.path is not None and not Path(config.model.path).is_dir():
        raise BadInput(f"model.path {config.model.path} does not exist (seen from {Path.cwd()}).")
    source = config.model.source
    commit = getattr(unquantized_config(source, config.model.revision), "_commit_hash", None)
    origin = {
        "model": str(Path(source).resolve()) if config.model.path else source,
        "revision": config.model.revision or commit,
    }
    if arguments.out.exists():
        manifest = check_reusable(arguments.out, config, origin)
        print(f"{arguments.out} is there already (NF4 hash {manifest['base_hash'][:12]})")
        return DONE
    if arguments.dry_run:
        print(f"would write the dequantized NF4 form of {source} to {arguments.out}")
        return DONE
    place = find_checkpoint(source, config.model.revision)
    model = load_nf4(place, config.model.dtype, config.policy.double_quantization)
    info = hash_nf4_model(model) | origin
    del model
    release_memory()
    if not info["quantized"]:
        raise BadInput(f"{source} has no linear layer to quantize.")

    def add_facts(directory: Path) -> dict:
        write_json(directory / "base.json", info)
        return {}

    facts = {"policy": "base", "base_hash": info["hash"], "adapter_version": None, "adapter_hash": None}
    write_bf16(BaseCheckpoint(place, info), {}, arguments.out, add_facts, **facts)
    print(f"wrote {arguments.out}: {source} as dequantized NF4 in BF16, NF4 hash {info['hash'][:12]}")
    return DONE


def check_reusable(directory: Path, config: Config, origin: dict) -> dict:
    """The manifest of a checkpoint that is the dequantized base of `config`; `BadInput` names what differs.

    `origin` holds the model and revision that the configuration stands for.
    """
    manifest = read_manifest(directory, "checkpoint")
    info = read_json(directory / "base.json")
    quantization = info.get("quantization") or {}
    found = {
        "policy": manifest.get("policy"),
        "format": manifest.get("format"),
        "model": info.get("model"),
        "revision": info.get("revision"),
        "model.dtype": quantization.get("storage_dtype"),
        "policy.double_quantization": quantization.get("double_quantization"),
    }
    wanted = {
        "policy": "base",
        "format": "bf16",
        **origin,
        "model.dtype": config.model.dtype,
        "policy.double_quantization": config.policy.double_quantization,
    }
    if wrong := [key for key, value in wanted.items() if found[key] != value]:
        key = wrong[0]
        raise BadInput(
            f"{directory} exists and is not the base of this configuration: its {key} is {found[key]!r}, the "
            f"configuration says {wanted[key]!r}. Remove it, or choose another place with --out."
        )
    return manifest
