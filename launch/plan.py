"""The command `python -m launch.plan`; the plan itself is kit/plan."""

from kit.core.errors import run_command
from kit.plan.command import main

if __name__ == "__main__":
    run_command(main)
