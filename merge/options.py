"""Options of `python -m merge base` and `… dequantize`, apart from what does the work, which imports torch."""

import argparse
from pathlib import Path


def base_parser() -> argparse.ArgumentParser:
    description = "Write the dequantized base of a run, which a rollout server holds, and its NF4 copy beside it."
    parser = argparse.ArgumentParser(prog="python -m merge base", description=description, allow_abbrev=False)
    parser.add_argument(
        "--config", required=True, help="YAML of the run; its model, policy and server groups are read"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="directory to write; default server.base or models/bases/<model>; a whole one is reused",
    )
    parser.add_argument("--dry_run", action="store_true", help="check the input, say what would be written")
    return parser


def dequantize_parser() -> argparse.ArgumentParser:
    description = "Write a quantized checkpoint as a plain one in BF16, which can be used as any other base."
    parser = argparse.ArgumentParser(prog="python -m merge dequantize", description=description, allow_abbrev=False)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model.path", dest="path", metavar="DIR", type=Path, help="local quantized checkpoint")
    model.add_argument("--model.id", dest="id", metavar="ID", help="hub id of one, e.g. Qwen/Qwen3-8B-FP8")
    parser.add_argument(
        "--model.revision", dest="revision", metavar="REV", help="hub revision (branch, tag or commit)"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")
    parser.add_argument("--dry_run", action="store_true", help="check the input, say what would be written")
    return parser
