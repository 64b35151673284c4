"""Options of the commands of `python -m merge`, without what does the work, which needs torch."""

import argparse
from pathlib import Path

from kit.core.gguf_types import GGUF_TYPES
from kit.core.own_code import add_flag
from kit.core.run_directory import INTO

LLAMACPP_PYTHON = Path(".venv-llamacpp/bin/python")


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


def import_parser() -> argparse.ArgumentParser:
    description = "Make a run directory of an adapter that peft, TRL, Unsloth or axolotl saved."
    epilog = (
        "Keys of the configuration can be given as --group.key value, e.g. --data.eval_path problems.jsonl "
        "--data.answer_format gsm8k; eval and the gate read them."
    )
    parser = argparse.ArgumentParser(
        prog="python -m merge import", description=description, epilog=epilog, allow_abbrev=False
    )
    parser.add_argument(
        "--adapter", type=Path, required=True, help="directory of adapter_config.json and adapter_model.safetensors"
    )
    parser.add_argument("--out", type=Path, required=True, help="run directory to make, e.g. runs/theirs")
    parser.add_argument("--base", help="16-bit base, a directory or a hub id; default the one that the adapter names")
    parser.add_argument("--revision", help="hub revision of the base (branch, tag or commit)")
    add_base_storage(parser)
    parser.add_argument("--config", help="YAML of a run: its model, policy, data, reward and eval groups are used")
    parser.add_argument("--dry_run", action="store_true", help="check the input, say what would be written")
    return parser


def verify_parser() -> argparse.ArgumentParser:
    description = "Compare merged checkpoints with the policy, base plus adapter, whoever merged them."
    parser = argparse.ArgumentParser(prog="python -m merge verify", description=description, allow_abbrev=False)
    add_run(parser)
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="checkpoints of the trained policy that another program merged; default: those in the run's merged/",
    )
    parser.add_argument("--out", type=Path, help="without --run: the run directory to make of --adapter")
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    """Options that name a run, or an adapter that no run of this kit trained."""
    parser.add_argument(
        "--run", type=Path, help="run directory, e.g. runs/tiny; without it, --out is one to make of --adapter"
    )
    parser.add_argument("--adapter", type=Path, help="adapter directory; default: the run's newest whole one")
    parser.add_argument("--base", type=Path, help="the original checkpoint, if it is not where base.json says")
    add_flag(parser)
    add_base_storage(parser)


def add_base_storage(parser: argparse.ArgumentParser) -> None:
    """Options on an adapter that no run of this kit trained."""
    parser.add_argument(
        "--base_storage",
        choices=("none", "nf4", "fp8"),
        help="storage of the base that an adapter of another program was trained on; default none, 16 bits",
    )
    parser.add_argument(
        "--prompts", type=Path, help="jsonl that such an adapter is verified and calibrated on; default generic text"
    )


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


def gguf_parser() -> argparse.ArgumentParser:
    description = "Write a run's merged BF16 checkpoint as GGUF, for llama.cpp and Ollama, with a Modelfile beside it."
    parser = argparse.ArgumentParser(prog="python -m merge gguf", description=description, allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="run directory with a merged BF16 checkpoint")
    parser.add_argument(
        "--type", nargs="+", choices=GGUF_TYPES, default=["q8_0"], help="types of weights to write; default q8_0"
    )
    parser.add_argument("--policy", choices=("base", "grpo"), default="grpo", help="default: grpo")
    parser.add_argument("--into", choices=INTO, default=INTO[0], help="checkpoint of which base; default dequantized")
    parser.add_argument("--out", type=Path, help="where <policy>/gguf_<type> goes; default beside the BF16 checkpoint")
    parser.add_argument(
        "--llamacpp_python",
        type=Path,
        default=LLAMACPP_PYTHON,
        help=f"Python that has llama.cpp's converter; default {LLAMACPP_PYTHON}",
    )
    parser.add_argument(
        "--llama_quantize", type=Path, help="llama.cpp's llama-quantize, for q6_k, q5_k_m, q4_k_m; default from PATH"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.add_argument("--skip_verify", action="store_true", help="do not compute with the file (verify: null)")
    add_flag(parser)
    parser.add_argument(
        "--dry_run", action="store_true", help="check architecture and tokenizer, print what would be written"
    )
    return parser
