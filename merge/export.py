"""Write the dequantized NF4 base before a run starts: what a rollout server should hold.

The trainer computes with dequantized NF4 weights. A server that holds the original ones samples from a policy about
9 % of weight error away; one that holds this checkpoint (in BF16, or quantized to FP8 by vLLM as it loads) does not.
"""

import argparse
from pathlib import Path

from merge.base import BaseCheckpoint, find_checkpoint, hash_nf4_model, load_nf4, unquantized_config
from merge.merge import write_bf16
from recipes.parts.config import load_config
from recipes.parts.errors import DONE, BadInput
from recipes.parts.rundir import read_manifest, write_json


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m merge base", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="YAML of the run; its model and policy groups are read")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; a whole one is reused")
    parser.add_argument("--dry_run", action="store_true", help="check the input, write nothing")
    arguments, overrides = parser.parse_known_args(argv)
    config = load_config(arguments.config, overrides)
    if arguments.out.exists():
        manifest = read_manifest(arguments.out, "checkpoint")
        print(f"{arguments.out} is there already (NF4 hash {manifest['base_hash'][:12]})")
        return DONE
    source = config.model.source
    unquantized_config(source, config.model.revision)
    if arguments.dry_run:
        print(f"would write the dequantized NF4 form of {source} to {arguments.out}")
        return DONE
    place = find_checkpoint(source, config.model.revision)
    model = load_nf4(place, config.model.dtype, config.policy.double_quantization)
    info = hash_nf4_model(model) | {"model": source, "revision": config.model.revision}
    del model
    if not info["quantized"]:
        raise BadInput(f"{source} has no linear layer to quantize.")

    def add_facts(directory: Path) -> dict:
        write_json(directory / "base.json", info)
        return {}

    facts = {"policy": "base", "base_hash": info["hash"], "adapter_version": None, "adapter_hash": None}
    write_bf16(BaseCheckpoint(place, info), {}, arguments.out, add_facts, **facts)
    print(f"wrote {arguments.out}: {source} as dequantized NF4 in BF16, NF4 hash {info['hash'][:12]}")
    return DONE
