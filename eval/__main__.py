"""`python -m eval --run …` measures, `… eval gate --run …` decides, `… eval report --run …` redraws.

`… eval endpoint --url … --run …` measures one deployed endpoint, `… eval lm_eval --run …` compares with the harness.
"""

import importlib
import os
import sys

from kit.core.errors import run_command

COMMANDS = {"gate": "eval.gate", "report": "eval.page", "lm_eval": "eval.harness", "endpoint": "eval.endpoint"}


def main() -> int | None:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the loading bars of eight models would bury the log lines
    module = COMMANDS.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if module:
        return importlib.import_module(module).main(sys.argv[2:])
    return importlib.import_module("eval.run").main()


if __name__ == "__main__":
    run_command(main)
