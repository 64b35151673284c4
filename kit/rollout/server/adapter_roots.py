"""Which directories a rollout server reads adapters from, and how: by descriptors below a root, never through a link.

The server copies the two files of an adapter before it looks at them, so whoever can write in the directory cannot put
other ones in their place between the check and the load.
"""

import contextlib
import os
import stat
from pathlib import Path

from kit.rollout.protocol import CONFIG, WEIGHTS
from kit.rollout.server.versions import Failure

ROOTS = "GRPO_KIT_ADAPTER_ROOTS"  # environment variable of the server: directories joined by os.pathsep
MAX_CONFIG_BYTES = 1 << 20


def roots() -> list[Path]:
    """The directories below which adapters may lie; none if the variable is not set."""
    return [Path(text) for text in os.environ.get(ROOTS, "").split(os.pathsep) if text]


def copy_adapter(named: str, into: Path, limit: int) -> None:
    """Copy weights and configuration of the adapter in the directory `named` to the directory `into`.

    `Failure` 403 if it is not below a root, 413 above `limit` bytes, 422 if a file is missing or no file.
    """
    with contextlib.ExitStack() as opened:
        folder = _open_below_root(Path(named), opened)
        for name, most in ((WEIGHTS, limit), (CONFIG, MAX_CONFIG_BYTES)):
            try:
                # Without NONBLOCK the open of a FIFO would wait for a writer.
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            except OSError as error:
                raise _unreadable(f"{named}/{name}", error) from None
            opened.callback(os.close, file)
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                raise Failure(422, f"{named}/{name} is no regular file. Write the adapter again.")
            if facts.st_size > most:
                raise Failure(413, f"{named}/{name} has {facts.st_size} bytes, this server takes {most}.")
            left = facts.st_size  # not what is appended meanwhile
            with open(into / name, "xb") as copy:
                while left and (part := os.read(file, min(left, 1 << 20))):
                    left -= copy.write(part)


def _open_below_root(path: Path, opened: contextlib.ExitStack) -> int:
    """Descriptor of a directory below a root, opened component by component without following links."""
    root = next((one for one in roots() if path.is_relative_to(one)), None)
    if root is None or ".." in path.parts:
        allowed = ", ".join(map(str, roots())) or "none"
        raise Failure(
            403,
            f"{path} is not below a directory that this server reads adapters from ({allowed}). Name it in "
            f"server.adapter_roots, or in the server's environment as {ROOTS}, or set rollout.transport to body.",
        )
    folder: int | None = None
    for part in (str(root), *path.relative_to(root).parts):
        try:
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            raise _unreadable(str(path), error) from None
        opened.callback(os.close, folder)
    assert folder is not None
    return folder


def _unreadable(path: str, error: OSError) -> Failure:
    reasons = {
        FileNotFoundError: "does not exist as this server sees it",
        PermissionError: "may not be read by this server's user",
    }
    reason = reasons.get(type(error), f"is a link or no directory ({error.strerror})")
    share = "share the run directory with it under the same path, or set rollout.transport to body."
    return Failure(422, f"{path} {reason}: {share}")
