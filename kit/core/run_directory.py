"""The run directory: its layout, and how an artifact is published whole or not at all.

Covers: atomic publication of directories and JSON files, manifests with sizes and content hashes, finding the newest
whole adapter or checkpoint of a run. Needs only the standard library, so every package may import it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core import file_kinds, own_code
from kit.core.checksum import with_checksum
from kit.core.errors import BadInput
from kit.core.one_line import one_line
from kit.core.run_files import is_directory, is_there, read_lines, read_object, read_optional

if TYPE_CHECKING:
    from kit.core.config.schema import Config

MANIFEST = "manifest.json"
# Files that readers pick up by name, so that one more in an artifact may change what is loaded.
TAKEN = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja")
NUMBERED = re.compile(r"(v|step-)(\d{6,})")  # directories of a run that are named after the step of their content
INTO = ("dequantized", "original")  # the base that an adapter is merged into


def file_hash(path: Path) -> str:
    """BLAKE2b-256 of a file's bytes, as hex."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def file_hashes(files: Iterable[Path]) -> list[str]:
    """`file_hash` of each file. Hashing releases the GIL, so the shards of a large checkpoint use a core each."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(file_hash, files))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError of the block that names no file, such as a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON so that a reader sees the old file or the new one, never half of it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(temporary, "w") as file:
            json.dump(value, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_record(path: Path, value: dict) -> None:
    """Write an object of the kit's own as `write_json` does, with a checksum that its reader compares."""
    write_json(path, with_checksum(value))


@contextlib.contextmanager
def publish(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside `final`; rename it to `final` on success, remove it on failure.

    Whatever interrupts the block (disk full, Ctrl-C, an exception), `final` is absent or whole. A process killed
    outright leaves a `.partial-…` directory that no tool reads and the next `publish` of the same name removes.

    Raises `BadInput` if `final` exists and `overwrite` is false, even if it appeared meanwhile, and if another process
    is writing it. A file system without locks cannot detect the latter: there the last writer fails at its end, and a
    dead process's directory stays.
    """
    final = Path(final)
    if final.exists() and not overwrite:
        raise BadInput(f"{final} exists already. Choose another place, or remove it first.")
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_partials(final)
    partial, lock = _make_partial(final)
    try:
        yield partial
        settle(partial)
        if final.exists() and overwrite:
            _replace(partial, final)
        else:
            _rename_to_new(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def settle(folder: Path) -> None:
    """Flush every file of a directory to disk and make it readable by whoever may read the directory.

    safetensors writes files that only their owner may read, and a server may run as another user.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            with contextlib.suppress(OSError):  # a file system without modes
                file.chmod(file.stat().st_mode | folder.stat().st_mode & 0o444)
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())


def _partial_of(final: Path) -> Path:
    return final.parent / f".partial-{final.name}.{secrets.token_hex(4)}"


def _make_partial(final: Path) -> tuple[Path, int]:
    """Create a directory for `final`; return it with the open handle that holds its lock until the process ends."""
    while True:
        partial = _partial_of(final)
        partial.mkdir()
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.is_dir():
            return partial, lock
        os.close(lock)  # removed as a dead process's before it was locked


def _remove_dead_partials(final: Path) -> None:
    """Remove what killed processes left of `final`; raise `BadInput` if a live one is writing it."""
    pattern = re.compile(rf"\.partial-{re.escape(final.name)}\.[0-9a-f]{{8}}")
    for partial in [entry for entry in final.parent.iterdir() if pattern.fullmatch(entry.name)]:
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # published meanwhile, or not this user's
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Rename first: a writer on another host, whose lock a network file system may hide, then fails. It must
            # not continue during the removal and list what is left as the whole.
            dead = partial.rename(_partial_of(final))
            shutil.rmtree(dead, ignore_errors=True)
        except BlockingIOError:
            raise BadInput(
                f"{final} is being written by another process, in {partial}. Wait until it ends, or choose another "
                "place."
            ) from None
        except OSError:
            pass  # no locks here, so it may be in use; or its process finished meanwhile
        finally:
            os.close(handle)


def _replace(partial: Path, final: Path) -> None:
    """Rename a directory to `final`, replacing an old version.

    Removing the old version takes time and comes last, so whatever is raised here, one of the two is whole at `final`.
    If `final` is a symlink, only the link is removed.
    """
    old = _partial_of(final)
    try:
        final.rename(old)
        _rename_to_new(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):  # what another process wrote there meanwhile stays
            old.rename(final)
        raise
    finally:
        old.unlink() if old.is_symlink() else shutil.rmtree(old, ignore_errors=True)


def _rename_to_new(partial: Path, final: Path) -> None:
    """Rename a directory; raise `BadInput` if there is another one at `final`."""
    try:
        os.rename(partial, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise BadInput(
            f"{final} was written by another process meanwhile. That one was kept, this one was removed."
        ) from None


def write_manifest(directory: Path, kind: str, **fields: Any) -> dict:
    """Write `manifest.json`, last, with the size and hash of every file in `directory`; return it."""
    directory = Path(directory)
    files = {
        str(file.relative_to(directory)): file
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    listed = {
        name: {"bytes": file.stat().st_size, "blake2b": content}
        for (name, file), content in zip(files.items(), file_hashes(files.values()), strict=True)
    }
    manifest = {"kind": kind, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **fields, "files": listed}
    write_record(directory / MANIFEST, manifest)
    return manifest


def manifest_as_written(directory: Path) -> dict:
    """The manifest of an artifact, whose files are not compared with it; {} if there is none."""
    return read_optional(Path(directory) / MANIFEST, file_kinds.MANIFEST)


def read_manifest(directory: Path, kind: str | None = None, deep: bool = False) -> dict:
    """Return the manifest of a whole artifact.

    Every listed file must exist with its listed size, and with its listed hash if `deep`; otherwise raises a
    `BadInput` that names the file. `kind` ("adapter", "checkpoint", "training-state", …) must match if given, and so
    must the step that a directory of a run is named after. If `deep`, the artifact may hold no other file that readers
    pick up by name: transformers applies an adapter that lies beside the weights, and prefers model.safetensors to
    shards.
    """
    directory = Path(directory)
    if not is_directory(directory):
        beside = sorted(entry.parent.name for entry in directory.parent.glob(f"*/{MANIFEST}"))
        others = f" {directory.parent} has {', '.join(beside[-3:])}." if beside else ""
        raise BadInput(f"{directory} does not exist (seen from {Path.cwd()}).{others}")
    if not is_there(directory / MANIFEST):
        if is_plain_adapter(directory):
            raise BadInput(_plain_adapter(directory))
        raise BadInput(f"{directory} has no {MANIFEST}: it was not written by this kit, or not completely.")
    manifest = read_object(directory / MANIFEST, file_kinds.MANIFEST)
    if kind is not None and manifest["kind"] != kind:
        raise BadInput(f"{directory} holds a {manifest['kind']!r:.40}, expected a {kind!r}.")
    if (named := NUMBERED.fullmatch(directory.name)) and manifest.get("step", int(named[2])) != int(named[2]):
        raise BadInput(
            f"{directory} holds what was written after step {manifest['step']}, by its manifest. Give the directory "
            "its own name back."
        )
    for name, listed in manifest["files"].items():
        file = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadInput(f"{directory / MANIFEST} lists {name!r:.60}, which is outside of {directory}.")
        if not is_there(file):
            raise BadInput(f"{directory} is not whole: {one_line(name, 80)} is missing.")
        if (size := file.stat().st_size) != listed["bytes"]:
            raise BadInput(f"{directory} is not whole: {name} has {size} bytes, its manifest says {listed['bytes']}.")
    if deep:
        _check_content(directory, manifest["files"])
    return manifest


def _check_content(directory: Path, listed: dict[str, dict]) -> None:
    """Raise `BadInput` unless the files of an artifact have the listed hashes and no other file can be taken for one
    of it."""
    hashes = file_hashes(directory / name for name in listed)
    for (name, facts), content in zip(listed.items(), hashes, strict=True):
        if content != facts["blake2b"]:
            raise BadInput(f"{directory} is damaged: the content of {name} is not what its manifest says.")
    there = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.suffix in TAKEN}
    if unlisted := sorted(there - set(listed) - {MANIFEST}):
        raise BadInput(
            f"{directory} holds {unlisted[0]}, which its manifest does not list: it may load as another model."
            " Move it elsewhere."
        )


def is_plain_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter that peft, not a run of this kit, wrote."""
    return is_there(Path(directory) / "adapter_config.json") and not is_there(Path(directory) / MANIFEST)


def _plain_adapter(directory: Path) -> str:
    """Error text for an adapter that peft alone wrote, where one of a run is needed."""
    return (
        f"{directory} is an adapter without {MANIFEST}, as peft alone writes it: the manifest has the hash of the "
        "base that it was trained on, without which nothing shows that it fits this base. Make a run of it with "
        f"python -m merge import --adapter {shlex.quote(str(directory))} --out runs/NAME, or start training from it "
        "with policy.init_adapter, which takes it as it is."
    )


def check_adapter_file(directory: Path, manifest: dict) -> None:
    """Raise `BadInput` unless an adapter's manifest lists its weights as safetensors."""
    if "adapter_model.safetensors" not in manifest["files"]:
        has = "its weights as adapter_model.bin" if "adapter_model.bin" in manifest["files"] else "no weights"
        raise BadInput(
            f"{directory} has {has}; merge, servers and init_adapter read adapter_model.safetensors. Save the adapter "
            "again with peft's save_pretrained, which writes that unless safe_serialization is False."
        )


def base_directory(config: "Config") -> Path:
    """Path of a configuration's dequantized base: `server.base`, or else models/bases/<name of the model>.

    The name includes the storage unless it is NF4. `python -m merge base` writes it and a rollout server reads it;
    nothing on disk is looked at here.
    """
    if config.server.base:
        return Path(config.server.base)
    # A local model may be given as `.` or `..`, which have no name of their own.
    name = Path(config.model.source).name
    name = name if name not in ("", "..") else Path(config.model.source).resolve().name
    kind = config.policy.quantization
    return Path("models/bases") / (name if kind == "nf4" else f"{name}-{'unquantized' if kind == 'none' else kind}")


def stored_as(config: "Config") -> dict[str, Any]:
    """{configuration key: value} of everything that decides how the base is stored.

    base.json has them under other names: type, storage_dtype, double_quantization.
    """
    policy = config.policy
    found = {"model.dtype": config.model.dtype, "policy.quantization": policy.quantization}
    return found | ({"policy.double_quantization": policy.double_quantization} if policy.quantization == "nf4" else {})


class RunDir:
    """Paths and readers of one run directory (layout in README.md)."""

    def __init__(self, path: str | Path, allow_own_code: bool = False):
        self.path = Path(path)
        self.allow_own_code = allow_own_code  # whether the code that its config.json names may be imported
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.ledger_file = self.path / "ledger.jsonl"
        self.resumes_file = self.path / "resumes.jsonl"
        self.restarts_file = self.path / "restarts.jsonl"
        self.base_file = self.path / "base.json"
        self.data_file = self.path / "data.json"
        self.eval_file = self.path / "eval.json"
        self.adapters = self.path / "adapters"
        self.checkpoints = self.path / "checkpoints"
        self.completions = self.path / "completions"
        self.merged = self.path / "merged"
        self.logs = self.path / "logs"
        self.not_finite = self.path / "not_finite"
        self.replaces = False  # whether --overwrite replaces the existing run

    @classmethod
    def open(cls, path: str | Path, allow_own_code: bool = False) -> "RunDir":
        """Open an existing run; raises `BadInput` if `path` is not one."""
        run = cls(path, allow_own_code)
        if not is_directory(run.path):
            raise BadInput(f"no run directory at {one_line(str(run.path), 200)} (seen from {Path.cwd()}).")
        if not is_there(run.config_file):
            raise BadInput(f"{run.path} has no config.json, so it is not a run directory.")
        return run

    @property
    def as_argument(self) -> str:
        """The path, quoted for a command line in a message."""
        return shlex.quote(str(self.path))

    def config(self) -> dict:
        """The resolved configuration, as nested dictionaries (`config` of config.json).

        The code that it names is held back from then on, or with `allow_own_code` trusted.
        """
        values = self.facts()["config"]
        if self.allow_own_code:
            own_code.trust(values)
        else:
            own_code.hold_back(values, self.config_file)
        return values

    def facts(self) -> dict:
        """The content of config.json: the configuration, versions, machine and hashes of the user's own code."""
        return read_object(self.config_file, file_kinds.CONFIG)

    def base(self) -> dict:
        """Hash and storage of the frozen base (base.json)."""
        return read_object(self.base_file, file_kinds.BASE)

    def metrics(self) -> list[dict]:
        """The rows of metrics.jsonl of a run that has ended; `metrics_log.MetricsLog` reads one that is growing."""
        is_begun = is_there(self.metrics_file)
        return read_lines(self.metrics_file, file_kinds.METRICS, may_be_growing=True) if is_begun else []

    def merged_into(self, into: str) -> Path:
        """Directory of the checkpoints merged into the dequantized or the original base (`INTO`)."""
        return self.merged if into == INTO[0] else self.path / f"merged-{into}"

    def adapter_dir(self, version: int) -> Path:
        return self.adapters / f"v{version:06d}"

    def newest_adapter(self) -> Path:
        """The whole adapter with the highest version; half-written ones are never considered."""
        return _newest_whole(self.adapters, "v", "adapter")

    def newest_checkpoint(self, passed_over: list[str] | None = None) -> Path:
        """The whole training checkpoint with the highest step, its files' content verified against its manifest.

        Errors of newer checkpoints are appended to `passed_over`.
        """
        return _newest_whole(self.checkpoints, "step-", "training-state", deep=True, passed_over=passed_over)


def _newest_whole(
    folder: Path, prefix: str, kind: str, deep: bool = False, passed_over: list[str] | None = None
) -> Path:
    damaged = [] if passed_over is None else passed_over
    for candidate in sorted(folder.glob(f"{prefix}[0-9]*"), reverse=True):
        try:
            read_manifest(candidate, kind, deep)
            return candidate
        except BadInput as error:
            damaged.append(str(error))
    if damaged:
        raise BadInput(
            f"no whole {kind} under {folder}: {len(damaged)} damaged, the newest because {damaged[0]} Put the file "
            "back, or start another run, from an adapter of this one with policy.init_adapter."
        )
    raise BadInput(f"no whole {kind} under {folder}. Train first, or name another run.")


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which `checkpoints/step-000010` was written."""
    return int(checkpoint.name.removeprefix("step-"))
