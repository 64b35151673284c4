"""The installed kit: one import package, and the command `kit`.

A wheel holds the rooms (kit, recipes, reward, launch, merge, eval) inside this package; `pip install -e .` leaves them
in the checkout. Only a process of `kit` has them on its path: `import eval` elsewhere finds nothing of ours.
"""

import sys
from pathlib import Path

__version__ = "0.1.0"


def rooms() -> Path:
    """The folder that holds the rooms: this package, or the checkout that it was installed from with -e."""
    here = Path(__file__).resolve().parent
    return here if (here / "kit").is_dir() else here.parents[1]


def main() -> None:
    """Run `kit` with the arguments of this process."""
    sys.path.insert(0, str(rooms()))
    from kit.__main__ import main
    from kit.core.errors import run_command

    run_command(main)
