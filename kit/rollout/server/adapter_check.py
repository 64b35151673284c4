"""Validate an adapter on a rollout server before any weight is touched, with the reasons to refuse it.

Names and shapes come from the file's header: no tensor is read, and neither torch nor vLLM is needed.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from kit.core import checkpoint_files, lora
from kit.core.checkpoint_files import Header
from kit.core.errors import BadInput
from kit.core.file_kinds import ADAPTER_CONFIG
from kit.core.run_files import read_object
from kit.rollout.protocol import CONFIG, QUANT_CFG, TENSORS, WEIGHTS

NOT_LAYERS = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")
DTYPES = ("BF16", "F16", "F32")


class Refused(Exception):
    """Adapter that this server cannot serve as the trainer computes it; the message is the reason and the fix."""


@dataclass(frozen=True)
class Room:
    """Limits of what a server can serve; None if not known.

    `modules` are the layers that may be adapted, `shapes` their weights' (out, in), `max_rank` the largest rank,
    `takes_patterns` whether rank_pattern and alpha_pattern are honored (vLLM's own LoRA scales all layers alike).
    """

    modules: frozenset[str] | None
    shapes: dict[str, tuple[int, int]]
    max_rank: int | None
    takes_patterns: bool


def read_header(path: Path) -> Header:
    """Header of a safetensors file; `Refused` if the file is missing, truncated or not a safetensors file."""
    try:
        return checkpoint_files.read_header(path)
    except (FileNotFoundError, PermissionError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        reason = "does not exist as this server sees it" if is_missing else "may not be read by this server's user"
        share = "share the run directory with it under the same path, or set rollout.transport to body."
        raise Refused(f"{path} {reason}: {share}") from None
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is not a whole safetensors file: {error}. Write it again.") from None


@dataclass(frozen=True)
class AdapterFacts:
    """An adapter without its tensors."""

    directory: Path
    config: dict
    header: Header


def read_adapter(directory: Path) -> AdapterFacts:
    """Read header and configuration of a peft adapter directory; `Refused` if one is missing or broken."""
    header = read_header(directory / WEIGHTS)
    try:
        return AdapterFacts(directory, read_object(directory / CONFIG, ADAPTER_CONFIG), header)
    except BadInput as error:
        raise Refused(str(error)) from None


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, int]]:
    """Return {layer name: (out, in)} of every 2-D weight of a checkpoint, except embeddings and the output layer.

    Empty if `directory` holds no safetensors file.
    """
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, (_, shape) in read_header(file).tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and len(shape) == 2 and module.split(".")[-1] not in NOT_LAYERS:
                found[module] = shape
    return found


def adapted_modules(shapes: dict[str, tuple[int, int]]) -> frozenset[str]:
    """Names under which an adapter's file may have factors for layers of these shapes: the layers, and for experts
    the modules that peft wraps."""
    experts = {name.partition(".experts.")[0] + ".experts" for name in shapes if ".experts." in name}
    return frozenset(shapes) | {name for module in experts for name in lora.expert_wrappers(module)}


def check(adapter: AdapterFacts, room: Room, quant_cfg: str | None = None) -> None:
    """`Refused`, with all reasons at once, if `adapter` is not a plain LoRA that fits into `room`, or was trained in
    another format than the server's `quant_cfg`."""
    reasons = [*_configured(adapter.config, room), *_tensors(adapter, room)]
    if (own := adapter.header.metadata.get(QUANT_CFG)) != quant_cfg:
        trained, served = (name or "the unquantized policy" for name in (own, quant_cfg))
        reasons.append(
            f"it was trained as {trained}, this server samples from {served}: start the server with the run's "
            "configuration"
        )
    if reasons:
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise Refused(f"{adapter.directory} cannot be served: {'; '.join(reasons[:3])}{more}.")


def _configured(config: dict, room: Room) -> list[str]:
    found = lora.reasons(config)
    for key in ("rank_pattern", "alpha_pattern"):
        if config.get(key) and not room.takes_patterns:
            found.append(f"{key}: vLLM's LoRA scales every layer by lora_alpha/r; train without it or sync by remerge")
    if config.get("target_parameters") and not room.takes_patterns:
        found.append("target_parameters: an adapter on experts is served merged only; sync by remerge")
    return found


def _tensors(adapter: AdapterFacts, room: Room) -> list[str]:
    if not adapter.header.tensors:
        return ["it holds no tensor"]
    found: list[str] = []
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in adapter.header.tensors.items():
        module, _, factor = name.removeprefix(TENSORS).removesuffix(".weight").rpartition(".")
        if factor not in ("lora_A", "lora_B") or not name.endswith(".weight") or not name.startswith(TENSORS):
            found.append(f"{name} is not lora_A or lora_B of a linear layer; train with a plain LoraConfig")
        elif module.split(".")[-1] in NOT_LAYERS:
            found.append(f"it adapts {module}; embeddings and the output layer are served unadapted, leave it out")
        elif dtype not in DTYPES:
            found.append(f"{name} is of type {dtype}, not {', '.join(DTYPES)}")
        else:
            layers.setdefault(module, {})[factor] = shape
    for module, factors in layers.items():
        found += _layer(module, factors, adapter.config, room)
    return found


def _layer(module: str, factors: dict[str, tuple[int, ...]], config: dict, room: Room) -> list[str]:
    if room.modules is not None and module not in room.modules:
        return [f"it adapts {module}, which the served model does not have or the server was not started for"]
    if len(factors) != 2:
        return [f"{module} has {next(iter(factors))} without the other factor"]
    a, b = factors["lora_A"], factors["lora_B"]
    if (parameter := lora.expert_parameter(config, module)) is not None:
        return _experts(parameter, a, b, config, room)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return [f"{module} has A {a} and B {b}, which do not multiply"]
    if module in room.shapes and (b[0], a[1]) != room.shapes[module]:
        return [f"{module} has A {a} and B {b} for a weight of {room.shapes[module]}"]
    if room.max_rank is not None and a[0] > room.max_rank:
        return [f"{module} has rank {a[0]}, the server was started with --max-lora-rank {room.max_rank}"]
    # peft scales by alpha over the configured rank; with patterns the worker looks up the module's own.
    if not config.get("rank_pattern") and (not isinstance(config.get("r"), int) or config["r"] != a[0]):
        return [f"{module} has rank {a[0]}, adapter_config.json says {config.get('r')}"]
    return []


def _experts(parameter: str, a: tuple[int, ...], b: tuple[int, ...], config: dict, room: Room) -> list[str]:
    """Reasons to refuse the factors of a fused parameter of experts: A (r·E, in), B (out, r·E)."""
    module, _, name = parameter.rpartition(".")
    parts = [part for part in lora.EXPERT_PARTS[name] if f"{module}.0.{part}" in room.shapes]
    if not parts:
        return [] if not room.shapes else [f"it adapts {parameter}, which the served base does not have"]
    experts = next(number for number in itertools.count() if f"{module}.{number}.{parts[0]}" not in room.shapes)
    (rows, columns), rank = room.shapes[f"{module}.0.{parts[0]}"], lora.rank_of(config, parameter)
    out = rows * len(parts)
    if rank is None or a != (rank * experts, columns) or b != (out, rank * experts):
        return [
            f"{parameter} has A {a} and B {b}; rank {rank} on {experts} experts of {(out, columns)} needs A "
            f"{((rank or 0) * experts, columns)} and B {(out, (rank or 0) * experts)}"
        ]
    return []
