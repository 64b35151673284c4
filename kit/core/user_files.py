"""Files and paths that a user names: what may be opened, what a path may be, how much is read.

Messages start with the path or continue after the key that names it. Imports no torch.
"""

import errno
import os
import stat
import unicodedata
from pathlib import Path
from typing import BinaryIO

from kit.core.errors import BadInput

MOST_PATH, MOST_NAME = 2000, 200  # bytes; Linux allows 4,095 and 255, and the kit appends names of its own
KINDS = {stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
KINDS |= {stat.S_IFSOCK: "socket"}


def path_fault(text: str) -> str:
    """Why `text` cannot be a path, as the end of a sentence; empty if it can. A path need not exist."""
    if not text:
        return "is empty"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        return "has a control character or a byte that is not UTF-8"
    if len(text.encode()) > MOST_PATH:
        return f"has {len(text.encode()):,} bytes, more than {MOST_PATH:,}"
    if (longest := max(len(part.encode()) for part in text.split("/"))) > MOST_NAME:
        return f"has a name of {longest:,} bytes between slashes, more than {MOST_NAME}"
    try:
        os.stat(Path(text).expanduser())
    except RuntimeError:
        return "starts with ~ and names no user of this machine"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a loop of symbolic links"
    return ""


def open_file(path: str | Path, what: str = "file") -> BinaryIO:
    """Open a regular file for reading; `BadInput` for anything else. Reading a pipe or a device might never end."""
    if fault := path_fault(str(path)):
        raise BadInput(f"the path of the {what} {fault}: {str(path)[:200]!r}.")
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without it, a pipe waits for a writer here
    except FileNotFoundError:
        raise BadInput(f"no {what} at {path} (seen from {Path.cwd()}).") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read as a {what}: {error.strerror}.") from None
    kind = stat.S_IFMT(os.fstat(number).st_mode)
    if kind != stat.S_IFREG:
        os.close(number)
        raise BadInput(f"{path} cannot be read as a {what}: it is a {KINDS.get(kind, 'special file')}.")
    return open(number, "rb")


def read_text(path: str | Path, most: int, what: str = "file") -> str:
    """The UTF-8 text of a file of at most `most` bytes, without a byte order mark; `BadInput` otherwise."""
    try:
        with open_file(path, what) as file:
            content = file.read(most + 1)
    except OSError as error:  # such as /proc/self/mem, which counts as a regular file
        raise BadInput(f"{path} cannot be read as a {what}: {error.strerror}.") from None
    if len(content) > most:
        raise BadInput(f"{path} is larger than {most:,} bytes, the most that is read.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8: {error.reason} at byte {error.start:,}.") from None
