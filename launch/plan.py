"""Plan a run before anything is loaded: memory by phase and GPU, what fits, seconds per step, the GPU split.

    python -m launch.plan --config recipes/configs/grpo-qwen3_8b-nf4-fp8-1x24gb.yaml --gpu rtx4090
    python -m launch.plan --config RUN.yaml --gpu h100-80g:8 --rollout.max_completion_length 4096
    python -m launch.plan --config RUN.yaml --gpu h100-80g:4 --launcher fsdp2
    python -m launch.plan --matrix
    python -m launch.plan --cards
    python -m launch.plan --check POINTS.json

Reads only the model's config, no weights; keys of the YAML can be given as --group.key value. Exit codes: 0 it fits,
1 it does not (or --check found a figure off by more than 10 %), 2 bad input.
"""

import argparse
import json

from kit.core.config.load import load_config
from kit.core.errors import CHECK_FAILED, DONE, BadInput, run_command
from kit.plan.gpus import parse_gpus
from kit.plan.layout import choose_shape, make_layout
from launch.starting.trainer_command import environment_of, read_launcher


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML of the run (recipes/configs)")
    parser.add_argument(
        "--gpu", default="auto", help="GPU and count, e.g. h100-80g:8, rtx4090, cpu; auto: this machine's"
    )
    parser.add_argument(
        "--launcher", help="accelerate configuration of the trainer, a file or a name in accelerate_configs: fsdp2"
    )
    parser.add_argument("--params", help="a model size, overrides the YAML's model: 8b, 32b, llama3-8b, qwen2.5-7b")
    parser.add_argument("--model", help="a model directory or hub id, overrides the YAML's model")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--matrix", action="store_true", help="models x GPUs: the longest completion that fits")
    parser.add_argument("--cards", action="store_true", help="what each GPU computes, trains in and serves")
    parser.add_argument("--check", metavar="JSON", help="compare with measured points (bench/memory_points.py)")
    flags, overrides = parser.parse_known_args()
    if flags.check is not None:
        from kit.plan.compare_points import check

        return check(flags.check, flags.json)
    if flags.cards:
        from kit.plan.cards_table import print_cards

        return print_cards(flags.json)
    if flags.matrix:
        from kit.plan.matrix import print_matrix

        return print_matrix(flags.json)
    if flags.config is None:
        raise BadInput("--config is missing: name the YAML of a run, or use --matrix.")
    config = load_config(flags.config, overrides, tuple(vars(flags)))
    with environment_of(read_launcher(flags.launcher).announces if flags.launcher else {}):
        layout = make_layout(config, choose_shape(config, flags.params, flags.model), *parse_gpus(flags.gpu))
        if flags.json:
            from kit.plan.report import as_json

            print(json.dumps(as_json(layout), indent=2))
        else:
            from kit.plan.report import report

            report(layout)
    return DONE if layout.fits else CHECK_FAILED


if __name__ == "__main__":
    run_command(main)
