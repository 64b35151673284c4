"""Write the dequantized base before a run starts, for a rollout server to load.

The trainer computes with dequantized NF4 weights (or FP8 ones, by policy.quantization). A server with the original
weights samples from a policy about 9 % of weight error away; one with this checkpoint (in BF16, or quantized to FP8 by
vLLM while loading) does not. Beside it is the NF4 copy (nf4/), from which a server rebuilds its weights for each
adapter; it rebuilds FP8 and unquantized bases from this checkpoint.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kit.core.checkpoint_files import INDEX, SINGLE
from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import DONE, BadInput, CheckFailed
from kit.core.file_kinds import BASE
from kit.core.run_directory import (
    MANIFEST,
    base_directory,
    file_hash,
    publish,
    read_manifest,
    stored_as,
    write_manifest,
    write_record,
)
from kit.core.run_files import read_object
from kit.weights.checkpoint import checkpoint_shards, find_checkpoint
from kit.weights.frozen_base import default_device
from kit.weights.model_files import unquantized_config
from kit.weights.write_base import NF4_FOLDER, Original, Plan, plan_base, write_base
from merge.merge import COMPANIONS, write_config
from merge.options import base_parser

# How a base is stored, in words, by policy.quantization.
STORED = {"nf4": "dequantized NF4", "fp8": "dequantized FP8", "none": "it is"}


def main(argv: list[str]) -> int:
    arguments, overrides = base_parser().parse_known_args(argv)
    config = load_config(arguments.config, overrides, tuple(vars(arguments)))
    out = arguments.out or base_directory(config)
    config.model.check_path()
    source = config.model.source
    described = unquantized_config(source, config.model.revision)
    # transformers also reports a commit for a directory in the hub's cache.
    commit = None if config.model.path else getattr(described, "_commit_hash", None)
    revision = commit or config.model.revision
    origin = {
        "model": str(Path(source).resolve()) if config.model.path else source,
        "revision": config.model.revision or commit,
    }
    if out.exists():
        manifest = check_reusable(out, config, origin, commit, refresh=not arguments.dry_run)
        print(f"{out} exists already (base hash {manifest['base_hash'][:12]})")
        return DONE
    if arguments.dry_run:
        place = find_checkpoint(source, revision, weights=False)
        kind = config.policy.quantization
        plan = plan_base(described, kind) if config.model.path is None else _open(config, place).plan
        check_space(out, plan)
        print(f"would write {out}: {source} as {STORED[kind]}, {sizes(plan)}; it does not exist yet")
        return DONE
    place = find_checkpoint(source, revision)
    opened = _open(config, place)
    info, held = export(opened, out, origin, commit), "FP16" if config.model.dtype == "float16" else "BF16"
    facts = info["quantization"]
    made_on = f" as quantized on a {facts['device']}" if facts["type"] == "nf4" else ""
    print(f"wrote {out}: {source} as {STORED[facts['type']]} in {held}, base hash {info['hash'][:12]}{made_on}")
    return DONE


def _open(config: Config, place: Path) -> Original:
    policy = config.policy
    return Original(place, config.model.dtype, policy.double_quantization, default_device(), policy.quantization)


def sizes(plan: Plan) -> str:
    """Disk space of the base, in words."""
    copy = f" and {_spell(plan.copy_bytes())} of NF4 copy" if plan.copy_bytes() else ""
    return f"{_spell(plan.weights_bytes())} in BF16{copy}"


def _spell(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def check_space(out: Path, plan: Plan) -> None:
    """Raise `BadInput` if the disk has less free space than the base takes."""
    existing = next(parent for parent in [out, *out.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if plan.weights_bytes() + plan.copy_bytes() > free:
        raise BadInput(
            f"{existing} has {_spell(free)} free and the base needs {sizes(plan)}. Free some space, or choose another "
            "place with --out."
        )


def export(source: Original, out: Path, origin: dict, commit: str | None) -> dict:
    """Publish the base of `source` at `out` and return its base.json.

    `origin` is the model and revision to record. `commit` is that of a hub model, None for a local one, whose files
    are recorded instead. `CheckFailed`, with nothing at `out`, if the disk is full or a file changes meanwhile.
    """
    with publish(out) as partial, recorded(source.directory, commit) as files:
        check_space(out, source.plan)  # after `publish` has removed what a killed process left behind
        print(f"writing {out}: {sizes(source.plan)}", flush=True)
        info = write_base(source, partial, **origin)
        write_config(source.directory, partial, None, str(source.written).removeprefix("torch."))
        write_record(partial / "base.json", info)
        made_from = source_facts(source.directory, commit, files)
        facts = {"policy": "base", "base_hash": info["hash"], "adapter_version": None, "adapter_hash": None}
        write_manifest(partial, "checkpoint", format="bf16", **facts, source=made_from)
    return info


def source_facts(directory: Path, commit: str | None, files: dict[str, Future]) -> dict:
    """Manifest entry for the source checkpoint; `files` come from `recorded`. `CheckFailed` if one changed since."""
    path = None if commit else str(directory.resolve())
    made_from = {"commit": commit, "path": path, "files": {name: future.result() for name, future in files.items()}}
    if commit is None and (change := changed_source(made_from, directory)):
        raise CheckFailed(f"{directory} changed while it was read: {change}. Start again.")
    return made_from


def source_files(directory: Path) -> list[Path]:
    """All files of a checkpoint that its base is made from: weights, index, config, tokenizer."""
    companions = [directory / name for name in COMPANIONS]
    companions += [file for folder in companions if folder.is_dir() for file in sorted(folder.rglob("*"))]
    shards = checkpoint_shards(directory)
    names = ["config.json", *([] if SINGLE in shards else [INDEX]), *shards]
    return [file for file in [*(directory / name for name in names), *companions] if file.is_file()]


def fingerprint(file: Path) -> dict:
    """Size, mtime and content hash of a file; the mtime is read first, so that a change during hashing shows."""
    stat = file.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "blake2b": file_hash(file)}


@contextlib.contextmanager
def recorded(directory: Path, commit: str | None) -> Iterator[dict[str, Future]]:
    """Yield {file: future fingerprint} for a local checkpoint, computed while the block runs; empty for a commit."""
    files = [] if commit else source_files(directory)
    pool = ThreadPoolExecutor(1)
    try:
        yield {str(file.relative_to(directory)): pool.submit(fingerprint, file) for file in files}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def changed_source(made_from: dict, directory: Path) -> str | None:
    """Describe how the files at `directory` differ from those recorded; None if they do not.

    A file of the same size and mtime at the same place counts as the same. At another mtime or place its content
    decides: other models have the same sizes, and an archive may give all its files one mtime.
    """
    moved = made_from.get("path") != str(directory.resolve())
    now = {str(file.relative_to(directory)): file for file in source_files(directory)}
    if names := sorted(set(now) ^ set(made_from["files"])):
        return f"{names[0]} is {'new' if names[0] in now else 'gone'}"
    touched = []
    for name, was in made_from["files"].items():
        stat = now[name].stat()
        if stat.st_size != was["bytes"]:
            return f"{name} has {stat.st_size} bytes, it had {was['bytes']}"
        if moved or stat.st_mtime_ns != was["mtime_ns"]:
            touched.append(name)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = pool.map(file_hash, [now[name] for name in touched])
        for name, content in zip(touched, hashes, strict=True):
            if content != made_from["files"][name]["blake2b"]:
                return f"{name} has other content"
    return None


def check_reusable(directory: Path, config: Config, origin: dict, commit: str | None, refresh: bool = True) -> dict:
    """Return the manifest of a checkpoint that is the dequantized base of `config`; `BadInput` names what differs.

    `origin` holds the model and revision that the configuration names, `commit` the current one of a hub model. A
    local model is identified by its content, wherever it is. With `refresh`, the place and mtimes of files with
    unchanged content are recorded, so that they are not compared again.
    """
    manifest = read_manifest(directory, "checkpoint", deep=True)
    made_from = manifest.get("source")
    info = read_object(directory / "base.json", BASE)
    quantization = info.get("quantization") or {}
    found = {
        "policy": manifest.get("policy"),
        "format": manifest.get("format"),
        "model": info.get("model"),
        "revision": info.get("revision"),
        "model.dtype": quantization.get("storage_dtype"),
        "policy.quantization": quantization.get("type"),
        "policy.double_quantization": quantization.get("double_quantization"),
    }
    wanted = {"policy": "base", "format": "bf16", **origin, **stored_as(config)}
    if commit is None and made_from is not None and made_from["commit"] is None:
        del wanted["model"]
    fix = f"Remove it (rm -r {directory}) and run this command again, or choose another place (server.base or --out)."
    if wrong := [key for key, value in wanted.items() if found[key] != value]:
        key = wrong[0]
        raise BadInput(
            f"{directory} exists and is not the base of this configuration: its {key} is {found[key]!r}, the "
            f"configuration says {wanted[key]!r}. {fix}"
        )
    is_nf4 = quantization.get("type") == "nf4"
    if is_nf4 and quantization.get("device") == "cpu" and default_device().type == "cuda":
        raise BadInput(
            f"{directory} holds NF4 as quantized on a CPU. A trainer on this machine's GPU gets other bytes from the "
            f"same weights, and its hash would not be the server's. {fix}"
        )
    if made_from is None or (is_nf4 and f"{NF4_FOLDER}/index.json" not in manifest["files"]):
        raise BadInput(
            f"{directory} was written by an earlier version of this kit, without its NF4 copy (nf4/). {fix}"
        )
    if commit is not None:
        if made_from["commit"] != commit:
            change = f"commit {made_from['commit']}, now {commit}"
            raise BadInput(f"{directory} was made before {origin['model']} changed ({change}). {fix}")
        return manifest
    source = find_checkpoint(origin["model"], config.model.revision)
    if change := changed_source(made_from, source):
        made_of = made_from.get("path") or info.get("model")
        if made_of != str(source.resolve()):
            raise BadInput(
                f"{directory} exists and is not the base of this configuration: it was made of {made_of}, and "
                f"{source} is another model ({change}). {fix}"
            )
        raise BadInput(f"{directory} was made before {origin['model']} changed ({change}). {fix}")
    if refresh:
        record_place(directory, manifest, source)
    return manifest


def record_place(directory: Path, manifest: dict, source: Path) -> None:
    """Record the current place and mtimes of the source's files in the manifest; skip this if it is not writable."""
    made_from, place = manifest["source"], str(source.resolve())
    times = {name: (source / name).stat().st_mtime_ns for name in made_from["files"]}
    known = {name: was["mtime_ns"] for name, was in made_from["files"].items()}
    if made_from.get("path") != place or known != times:
        made_from["path"] = place
        for name, time in times.items():
            made_from["files"][name]["mtime_ns"] = time
        with contextlib.suppress(OSError):
            write_record(directory / MANIFEST, manifest)
