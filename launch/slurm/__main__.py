"""Write the Slurm job of a run from its YAML:

    python -m launch.slurm --config X.yaml --out job.sbatch
    python -m launch.slurm --config X.yaml --nodes 2 --partition gpu --account lab --time 2-00:00:00 --out job.sbatch

One node: `launch.up`, servers on server.gpus and the trainer on the others. Two nodes: servers on all GPUs of the
first, the trainer on all of the second. More: servers on the first, the trainer on the rest. Keys of the YAML can be
given as --group.key value; they go into the script. Nothing is submitted.
"""

import sys
from pathlib import Path

from kit.core.as_typed import plain_stdout
from kit.core.config.load import load_config
from kit.core.errors import DONE, BadInput, command_parser, run_command
from launch.slurm.script import Job, describe, write_script


def main() -> int:
    parser = command_parser("launch.slurm", __doc__)
    parser.add_argument("--config", required=True, help="YAML of the run (recipes/configs)")
    parser.add_argument("--nodes", type=int, default=1, help="1: servers and trainer share it; 2 or more: see above")
    parser.add_argument(
        "--gpus_per_node",
        type=int,
        help="GPUs to ask for on each node; 0: a CPU node; default 8, on one node those that the YAML counts up to",
    )
    parser.add_argument("--cpus_per_gpu", type=int, default=8, help="CPU cores to ask for, per GPU")
    parser.add_argument("--partition", help="Slurm partition; default the cluster's")
    parser.add_argument("--account", help="Slurm account; default the user's")
    parser.add_argument("--time", default="24:00:00", help="time limit as Slurm writes it: 24:00:00, 2-12, 90")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="one node: launch.up --restarts N (launch/README.md)"
    )
    parser.add_argument("--out", type=Path, help="file to write; default standard output")
    flags, overrides = parser.parse_known_args()
    config = load_config(flags.config, overrides, tuple(vars(flags)))
    listed = [*(config.train.gpus or []), *(config.server.gpus or [])] if flags.nodes == 1 else []
    job = Job(
        config_path=flags.config,
        overrides=tuple(overrides),
        nodes=flags.nodes,
        gpus=flags.gpus_per_node if flags.gpus_per_node is not None else 1 + max(listed, default=7),
        cpus_per_gpu=flags.cpus_per_gpu,
        partition=flags.partition,
        account=flags.account,
        time=flags.time,
        restarts=flags.restarts,
    )
    text = write_script(job, config)
    print(describe(job, config), file=sys.stderr)
    if flags.out is None:
        plain_stdout().write(text)  # a job runs where there may be no `kit`
        return DONE
    try:
        flags.out.write_text(text)
    except OSError as error:
        raise BadInput(f"--out {flags.out} cannot be written: {error.strerror}.") from None
    print(f"{flags.out}: submit it from this directory with sbatch {flags.out}")
    return DONE


if __name__ == "__main__":
    run_command(main)
