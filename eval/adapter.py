"""Evaluate an adapter that no run of this kit trained: make its run directory and merge what the matrix needs."""

import argparse

from eval.artifacts import check_formats, one_is_there, unmerged
from eval.asked import asked_config, keys_of
from eval.problems import held_out
from kit.core.config.load import resolve, to_dict
from kit.core.run_directory import RunDir
from merge.__main__ import main as merge
from merge.imported import import_of


def prepare(arguments: argparse.Namespace, overrides: list[str]) -> RunDir | None:
    """Return the run of --adapter in --out, with every checkpoint merged that the evaluation needs; None after a dry
    run that would make it.

    Everything that can be refused is, the problems included, before the base is hashed or a file written. Options that
    mean something else for a run (--adapter, --base, --out) are cleared.
    """
    # With --task, --data.… are about its problems, and not about those that the adapter was trained on.
    made = import_of(arguments, keys_of(arguments, overrides) if arguments.task is None else [])
    run = made.existing() if made.out.exists() else None
    values = run.config() if run else to_dict(made.config)
    config, training = asked_config(lambda keys: resolve(values, keys, str(made.out)), arguments, overrides)
    formats = check_formats(arguments.formats or config.eval.formats)
    problems = held_out(config.data, config.eval.max_problems, training, config.eval.reward)
    if run is None:
        print(made.describe(), flush=True)
        if made.dry_run:
            print(f"would merge it in {', '.join(formats)} and ask {len(problems)} problems", flush=True)
            return None
        run = made.write()
    missing = list(dict.fromkeys(name for _, name in unmerged(run, formats)))
    if missing and not made.dry_run:
        overwrite = ["--overwrite"] if one_is_there(run, missing) else []
        merge(["--run", str(run.path), "--format", *missing, *overwrite])
    arguments.run, arguments.config = run.path, None
    arguments.adapter = arguments.base = arguments.out = arguments.base_storage = arguments.prompts = None
    return run
