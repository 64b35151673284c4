"""The checkpoints to evaluate: the run's adapter and merged checkpoints, verified to be complete and of one origin.

Everything is read from manifests and hashes, before any weight is loaded.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from kit.core import formats
from kit.core.chat import arguments_of
from kit.core.config import schema
from kit.core.errors import BadInput
from kit.core.run_directory import MANIFEST, RunDir, read_manifest, write_record
from merge.trained import find_trained

POLICIES = ("base", "grpo")
# nf4 first: with the adapter, it is the policy as trained, to which the other columns are compared.
FORMATS = ("nf4", *(name for name in formats.FORMATS if name != "nf4"))


@dataclass(frozen=True)
class Artifact:
    """A merged checkpoint: its directory, its manifest, and a hash of all its files."""

    path: Path
    manifest: dict
    hash: str


@dataclass(frozen=True)
class Sources:
    """Everything the matrix is measured on; `adapter` is None if no nf4 cell was requested.

    `trained_for` is {"trained_for": format, "quantizer_hash": …} for a run that was trained for a format, else empty;
    `storage` is how the base is stored, which the nf4 cells compute with.
    """

    base_hash: str
    adapter: Path | None
    adapter_version: int | None
    adapter_hash: str | None
    artifacts: dict[tuple[str, str], Artifact]
    trained_for: dict[str, str] = field(default_factory=dict)
    storage: str = "nf4"


def check_formats(formats: list[str]) -> list[str]:
    """Return the formats in the order of the matrix; `BadInput` for an unknown, duplicate or empty choice."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats or len(set(formats)) != len(formats):
        raise BadInput(f"eval.formats must be some of {', '.join(FORMATS)}, each once; it is {formats}.")
    return [name for name in FORMATS if name in formats]


def artifact(run: RunDir, policy: str, name: str) -> Artifact:
    """Return the run's merged checkpoint, with its content checked against the hashes in its manifest.

    `BadInput` if a file is missing or changed, if it holds another policy or format than its path says, or if it was
    made from another base than the run's.
    """
    path = run.merged / policy / name
    manifest = read_manifest(path, "checkpoint", deep=True)
    again = f"Merge it again: {merge_command(run, [name])} --overwrite"
    if (found := (manifest.get("policy"), manifest.get("format"))) != (policy, name):
        raise BadInput(f"{path} holds {found[0]}/{found[1]} according to its manifest. {again}")
    base, expected = manifest.get("base_hash"), run.base()["hash"]
    if base != expected:
        raise BadInput(
            f"{path} was made from another base: its base_hash is {base}, the run's base.json says {expected}. {again}"
        )
    trained, defaults = arguments_of(run.config()), manifest.get("chat_template_kwargs", {})
    if defaults != trained:
        raise BadInput(
            f"{path} renders prompts with chat_template_kwargs {defaults}, the run was trained with {trained}. {again}"
        )
    return Artifact(path, manifest, artifact_hash(manifest))


def artifact_hash(manifest: dict) -> str:
    """BLAKE2b-128 of the names, sizes and hashes of an artifact's files; the rest of its manifest is excluded."""
    return hashlib.blake2b(json.dumps(manifest["files"], sort_keys=True).encode(), digest_size=16).hexdigest()


def adapter_hash(manifest: dict) -> str:
    """The hash that merged checkpoints carry as `adapter_hash` for this adapter's manifest."""
    return manifest.get("tensor_hash") or manifest["files"]["adapter_model.safetensors"]["blake2b"]


def merge_command(run: RunDir, formats: list[str]) -> str:
    """The command line that makes the merged checkpoints of `formats`."""
    return f"python -m merge --run {run.as_argument} --format {' '.join(formats)}"


def unmerged(run: RunDir, formats: list[str]) -> list[tuple[str, str]]:
    """(policy, format) of the merged checkpoints of `formats` that do not exist."""
    wanted = [(policy, name) for name in formats if name != "nf4" for policy in POLICIES]
    return [(policy, name) for policy, name in wanted if not (run.merged / policy / name / MANIFEST).is_file()]


def merge_missing(run: RunDir, missing: list[tuple[str, str]]) -> str:
    """The command line that makes the checkpoints that `unmerged` returned."""
    names = list(dict.fromkeys(name for _, name in missing))
    return f"{merge_command(run, names)}{' --overwrite' if one_is_there(run, names) else ''}"


def one_is_there(run: RunDir, formats: list[str]) -> bool:
    """Whether a checkpoint of `formats`, whole or not, is in the run, so that merging has to overwrite it."""
    return any((run.merged / policy / name).exists() for policy in POLICIES for name in formats)


def eval_command(run: RunDir, formats: list[str] | None = None) -> str:
    """The command line that evaluates the run in `formats` (default: its eval.formats), after any missing merges."""
    default = (run.config().get("eval") or {}).get("formats") or schema.EvalConfig().formats
    formats = formats or default
    chosen = "" if set(formats) == set(default) else f" --formats {' '.join(formats)}"
    missing = unmerged(run, formats)
    first = f"{merge_missing(run, missing)} && " if missing else ""
    return f"{first}python -m eval --run {run.as_argument}{chosen}"


def find_sources(run: RunDir, formats: list[str]) -> Sources:
    """The checked sources of every cell in {base, grpo} x `formats`; `BadInput` says what is missing or wrong."""
    base = run.base()
    base_hash, storage = base["hash"], (base.get("quantization") or {}).get("type", "nf4")
    merged = [name for name in formats if name != "nf4"]
    if missing := unmerged(run, merged):
        raise BadInput(
            f"not merged yet: {', '.join(str(run.merged / policy / name) for policy, name in missing)}. Merge with: "
            f"{merge_missing(run, missing)}"
        )
    artifacts = {(policy, name): artifact(run, policy, name) for policy in POLICIES for name in merged}
    version, digest = _adapter_of(run, {name: artifacts["grpo", name].manifest for name in merged})
    adapter = None
    if "nf4" in formats:
        adapter = run.newest_adapter() if version is None else run.adapter_dir(version)
        manifest = read_manifest(adapter, "adapter", deep=True)
        if manifest.get("base_hash") != base_hash:
            raise BadInput(
                f"{adapter} was trained on another base: its base_hash is {manifest.get('base_hash')}, the run's "
                f"base.json says {base_hash}."
            )
        if digest is not None and adapter_hash(manifest) != digest:
            raise BadInput(
                f"{adapter} hashes to {adapter_hash(manifest)}, the merged checkpoints were made from {digest}. Merge "
                f"again: {merge_command(run, merged)} --overwrite"
            )
        version, digest = manifest.get("version"), adapter_hash(manifest)
    trained = check_trained(run, version, artifacts)
    return Sources(base_hash, adapter, version, digest, artifacts, trained, storage)


def check_trained(run: RunDir, version: int | None, checkpoints: dict[tuple[str, str], Artifact]) -> dict[str, str]:
    """Return what the run was trained for, from the adapter of that version; `BadInput` if a checkpoint disagrees."""
    adapter = run.adapter_dir(version) if version is not None else None
    trained = find_trained(run, adapter if adapter is not None and adapter.is_dir() else None)
    facts = {} if trained is None else trained.facts()
    for (policy, name), checkpoint in checkpoints.items():
        for key in ("trained_for", "quantizer_hash"):
            if (found := checkpoint.manifest.get(key)) != facts.get(key):
                raise BadInput(
                    f"{policy} in {name} was merged from other quantizers: its manifest says {key} {found}, the run's "
                    f"adapter {facts.get(key)}. Merge it again: {merge_command(run, [name])} --overwrite"
                )
    return facts


def _adapter_of(run: RunDir, manifests: dict[str, dict]) -> tuple[int | None, str | None]:
    """(version, hash) of the one adapter in all merged checkpoints; (None, None) when there is no checkpoint."""
    if not manifests:
        return None, None
    if len({manifest.get("adapter_hash") for manifest in manifests.values()}) > 1:
        held = ", ".join(f"{name} holds v{manifest.get('adapter_version')}" for name, manifest in manifests.items())
        raise BadInput(
            f"the merged checkpoints hold different adapters ({held}), so their accuracies cannot be compared. Merge "
            f"them again: {merge_command(run, list(manifests))} --overwrite"
        )
    manifest = next(iter(manifests.values()))
    return manifest.get("adapter_version"), manifest.get("adapter_hash")


def set_promotion(checkpoint: Artifact, promotion: dict | None) -> None:
    """Write `promoted` (and its evidence) into an artifact's manifest atomically."""
    manifest = {**checkpoint.manifest, "promoted": promotion is not None, "promotion": promotion}
    write_record(checkpoint.path / MANIFEST, manifest)
