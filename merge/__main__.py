"""Merge a run's adapter into its dequantized base and write the requested formats; see README.md.

`python -m merge base --config X.yaml` writes the dequantized base alone, for a rollout server; `python -m merge
diagnose` measures what training did to the weights; `python -m merge verify` compares existing checkpoints with the
policy; `python -m merge card` rewrites the model cards after an evaluation; `python -m merge dequantize` converts a
checkpoint that is stored quantized into a base in BF16; `python -m merge import` makes a run of an adapter that
another program trained; `python -m merge gguf` writes a merged checkpoint for llama.cpp and Ollama.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kit.core.errors import CHECK_FAILED, DONE, run_command
from kit.core.formats import FORMATS
from kit.core.run_directory import INTO
from merge.bases import check_options, compare_bases
from merge.card import add_hub_options, push_all, trained_by, write_card
from merge.command import AWQ_PYTHON, POLICIES, Merge
from merge.hub import check_access
from merge.options import add_run, base_parser, dequantize_parser, gguf_parser, import_parser, verify_parser
from merge.tables import show_table


@dataclass
class Row:
    """One row of the table printed after a merge."""

    policy: str
    format: str
    path: Path
    manifest: dict | None
    seconds: float
    note: str = ""
    called: str = ""  # the policy's display name


def at_least_one(text: str) -> int:
    """Parse an integer of at least 1; argparse reports the option and the text otherwise."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m merge", description=__doc__, allow_abbrev=False)
    add_run(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--format", nargs="+", choices=FORMATS, help="formats to write; default: the one the run was trained for"
    )
    what.add_argument(
        "--compare_bases", action="store_true", help="merge the policy into both bases in bf16, print which is closer"
    )
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: both")
    parser.add_argument(
        "--into",
        choices=INTO,
        default=INTO[0],
        help="the base to merge into: the dequantized one that was trained on (default), or the original weights",
    )
    parser.add_argument(
        "--out", type=Path, help="where <policy>/<format> goes; default: merged/, or merged-original/, in the run"
    )
    parser.add_argument(
        "--calib_samples", type=at_least_one, default=128, help="prompts that awq, fp8_static, nvfp4 calibrate on"
    )
    parser.add_argument("--calib_seq_len", type=at_least_one, default=512, help="maximum tokens of each prompt")
    parser.add_argument(
        "--awq_python", type=Path, default=AWQ_PYTHON, help=f"Python that has llm-compressor; default {AWQ_PYTHON}"
    )
    parser.add_argument("--force", action="store_true", help="write nf4 even if it loses the update")
    parser.add_argument("--overwrite", action="store_true", help="replace existing checkpoints")
    parser.add_argument("--skip_verify", action="store_true", help="do not compare with the policy (verify: null)")
    parser.add_argument(
        "--dry_run", action="store_true", help="check the input, print what would be written, and exit"
    )
    add_hub_options(parser)
    return parser.parse_args(argv)


def print_table(rows: list[Row]) -> None:
    """Print the table that ends a merge; `-` marks what does not apply or was not requested."""
    cells = []
    for row in rows:
        manifest = row.manifest or {}
        weights = sum(f["bytes"] for n, f in manifest.get("files", {}).items() if n.endswith(".safetensors"))
        kept, found = manifest.get("retained_update"), manifest.get("verify")
        unknown = "no_retained_update" in manifest  # the reason why it was not computed
        numbers = ["-", "-", "-"]
        if found:
            numbers = [f"{found['mean_kl']:.2e}", f"{found['max_abs_dlogp']:.3f}", f"{found['top1_agreement']:.3f}"]
        no_share = "no update" if row.policy == "grpo" and not unknown else "-"
        share = no_share if kept is None else f"{kept:.4f}"
        what = (row.called or row.policy, row.format, f"{weights / 2**20:.2f}" if weights else "-", share)
        cells.append((*what, *numbers, row.note or str(row.path), f"{row.seconds:.1f}"))
    head = ("policy", "format", "MiB", "update kept", "KL(policy‖it)", "max |Δlogp|", "top-1", "path", "s")
    show_table(head, cells)


def main(argv: list[str] | None = None) -> int:
    """Check, merge, quantize, verify; return 0 if every format was written, 1 if one was refused."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["base"]:
        base_parser().parse_known_args(argv[1:])  # --help and invalid options need not wait for torch
        from merge.export import main as export

        return export(argv[1:])
    if argv[:1] == ["diagnose"]:
        from merge.diagnose import main as diagnose

        return diagnose(argv[1:])
    if argv[:1] == ["card"]:
        from merge.card import main as card

        return card(argv[1:])
    if argv[:1] == ["dequantize"]:
        dequantize_parser().parse_args(argv[1:])
        from merge.dequantize import main as dequantize

        return dequantize(argv[1:])
    if argv[:1] == ["import"]:
        import_parser().parse_known_args(argv[1:])
        from merge.imported import main as imported

        return imported(argv[1:])
    if argv[:1] == ["gguf"]:
        gguf_parser().parse_args(argv[1:])
        from merge.gguf import main as gguf

        return gguf(argv[1:])
    if argv[:1] == ["verify"]:
        verify_parser().parse_args(argv[1:])
        from merge.verify_command import main as verify

        return verify(argv[1:])
    arguments = parse_arguments(argv)
    from merge.imported import run_of

    if arguments.compare_bases:
        check_options(arguments)
    if arguments.push_to_hub:
        check_access(arguments.push_to_hub)
    if run_of(arguments) is None:
        return DONE
    if arguments.compare_bases:
        return compare_bases(arguments, argv)
    merge = Merge(arguments)
    called = {"base": "base", "grpo": trained_by(merge.run.config()).lower()}
    for policy, name in merge.targets():
        size = "" if merge.base is None else f", about {merge.bytes_of(name) / 2**20:.1f} MiB"
        print(f"{called[policy]} {name}: {merge.place(policy, name)}{size}{merge.note(name)}", flush=True)
    if merge.arguments.dry_run:
        return DONE

    from merge.quantize import Refused

    rows, refused = [], []
    for policy, name in merge.targets():
        started = time.perf_counter()
        manifest, note = None, ""
        try:
            manifest = merge.write(policy, name)
            write_card(merge.run, merge.place(policy, name))
        except Refused as error:
            refused.append(f"{called[policy]} {name}: {error}")
            manifest, note = {"retained_update": error.share}, "refused"
        seconds = time.perf_counter() - started
        rows.append(Row(policy, name, merge.place(policy, name), manifest, seconds, note, called[policy]))
    print_table(rows)
    for reason in refused:
        print(f"refused: {reason}", flush=True)
    if arguments.push_to_hub:
        written = [row for row in rows if not row.note and row.format in merge.formats]
        push_all(arguments, {(row.policy, row.format): row.path for row in written})
    return CHECK_FAILED if refused else DONE


if __name__ == "__main__":
    # Read when tqdm is imported: the loaders' progress bars would bury the few lines that matter. Not in main(), since
    # a caller's children would inherit it, and vLLM 0.31 divides by zero when its own bars are off.
    os.environ.setdefault("TQDM_DISABLE", "1")
    run_command(main)
