"""`python -m eval --run …` measures, `… eval gate --run …` decides, `… eval report --run …` redraws.

`… eval endpoint --url … --run …` measures one deployed endpoint, `… eval lm_eval --run …` compares with the harness.
"""

import os
import sys

from kit.core.errors import run_command


def main() -> int | None:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the loading bars of eight models would bury the log lines
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "gate":
        from eval.gate import main as gate

        return gate(sys.argv[2:])
    if command == "report":
        from eval.page import main as redraw

        return redraw(sys.argv[2:])
    if command == "lm_eval":
        from eval.harness import main as harness

        return harness(sys.argv[2:])
    if command == "endpoint":
        from eval.endpoint import main as endpoint

        return endpoint(sys.argv[2:])
    from eval.run import main as measure

    return measure()


if __name__ == "__main__":
    run_command(main)
