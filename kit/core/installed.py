"""Versions of installed packages."""

from collections.abc import Iterable
from importlib import metadata


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """{name: version} of those packages that are installed, in the order of `names`."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def is_version(found: str, wanted: str) -> bool:
    """Whether an installed version is `wanted`: 2.13.0 takes every build (2.13.0+cu130), 2.13.0+cpu takes no other."""
    return found == wanted or ("+" not in wanted and found.partition("+")[0] == wanted)
