"""Export a run to another trainer:

    python -m launch.export verl --config X.yaml --out exports/run --gpus_per_node 8 --nodes 4
    make verl
    python -m launch.export check exports/run

`verl` writes run.sh (the command, for a Ray cluster), overrides.yaml (the same as a configuration file), the data as
parquet, the kit's rewards behind verl's compute_score, and notes.md: what differs there. Keys of the YAML can be given
as --group.key value. `check` validates run.sh against the configuration schema, the validation, the data set reader
and the reward loader of the verl version that requirements-verl.txt pins, in its own environment (make verl).
"""

import shlex
import sys
from pathlib import Path

from kit.core.config.load import load_config
from kit.core.errors import DONE, command_parser, run_command
from launch.export.check import check
from launch.export.files import write
from launch.export.translate import Cluster, translate


def main() -> int:
    parser = command_parser("launch.export", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verl = commands.add_parser("verl", help="write a run for verl", allow_abbrev=False)
    verl.add_argument("--config", required=True, help="YAML of the run (recipes/configs)")
    verl.add_argument("--out", type=Path, required=True, help="directory to write, on a file system of all nodes")
    verl.add_argument("--nodes", type=int, default=1, help="machines of the Ray cluster")
    verl.add_argument("--gpus_per_node", type=int, default=8, help="GPUs of each")
    verl.add_argument(
        "--processes",
        type=int,
        help="trainer processes of the run here, which decide a step's completions; default: the number of "
        "train.gpus, or what server.gpus leaves of 8, else 1",
    )
    verl.add_argument(
        "--dequantized_base",
        action="store_true",
        help="train on what `python -m merge base` wrote, the weights that the run computes with here; default: the "
        "original model",
    )
    checked = commands.add_parser("check", help="hold exports against verl's own code", allow_abbrev=False)
    checked.add_argument("directories", type=Path, nargs="+", help="what `verl` wrote")
    flags, overrides = parser.parse_known_args()
    if flags.command == "check":
        if overrides:
            parser.error(f"unrecognized arguments: {' '.join(overrides)}")
        return check(flags.directories)
    config = load_config(flags.config, overrides, tuple(vars(flags)))
    cluster = Cluster(flags.nodes, flags.gpus_per_node)
    translation = translate(config, cluster, flags.processes, flags.dequantized_base, flags.out.resolve())
    print(write(config, translation, flags.out, f"python -m launch.export {shlex.join(sys.argv[1:])}"))
    return DONE


if __name__ == "__main__":
    run_command(main)
