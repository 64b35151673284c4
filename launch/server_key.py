"""The API key of the servers that `launch.up` starts: one per start, for this user alone.

Servers and trainer get it in their environment, which other users cannot read and no process list shows. It also
stands in `logs/server.key` of the run, readable by this user, while the servers run: for a second terminal.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from kit.core.run_directory import RunDir

VARIABLE = "VLLM_API_KEY"


def key_file(run: RunDir) -> Path:
    return run.logs / "server.key"


@contextlib.contextmanager
def own_key(run: RunDir) -> Iterator[None]:
    """Set a new key for what is started in the block, unless the user's environment has one."""
    if os.environ.get(VARIABLE):
        yield
        return
    file, key = key_file(run), secrets.token_urlsafe(32)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # of a start that was killed
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as opened:
        opened.write(f"{key}\n")
    os.environ[VARIABLE] = key
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        file.unlink(missing_ok=True)


def take_key(run: RunDir) -> None:
    """Use the key of the servers that `launch.up` runs for this run, unless the environment has one."""
    with contextlib.suppress(FileNotFoundError):
        os.environ.setdefault(VARIABLE, key_file(run).read_text().strip())
