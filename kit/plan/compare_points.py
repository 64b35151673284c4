"""Compare the plan's expected figures with measured ones (written by bench/memory_points.py)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.config.load import config_from_dict
from kit.core.config.schema import Config
from kit.core.errors import CHECK_FAILED, DONE, BadInput
from kit.core.file_kinds import POINTS
from kit.core.run_files import read_object
from kit.plan import memory
from kit.plan.decoder import Shape
from kit.plan.gpus import CARDS, recognize
from kit.plan.shapes import shape_from_facts

Point = dict[str, Any]  # one measurement of the file
LIMIT = 0.10
AS_EVER = ("plain", "torch")  # values left out of a point's name


@dataclass(frozen=True)
class Row:
    """One figure in GiB: what the plan predicts and what was measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def recompute_of(point: Point) -> str:
    """`train.recompute` of a point; older points have gradient_checkpointing, true or false."""
    return point.get("recompute", "full" if point.get("gradient_checkpointing", True) else "none")


def point_config(point: Point) -> Config:
    """The configuration that a point was measured with, as far as the plan reads it."""
    given = {key: point[key] for key in ("micro_batch", "completions") if key in point}
    micro = given.get("micro_batch", 8)
    server = {key: point[key] for key in ("weights", "kv_cache_gib", "max_num_seqs", "enforce_eager") if key in point}
    values: dict[str, dict] = {
        "run": {"name": "point"},
        "model": {"id": "point"},
        "policy": {"lora_rank": point["lora_rank"], "adapter_dtype": point.get("adapter_dtype", "float32")}
        | {key: point[key] for key in ("compute", "kernels", "embeddings", "expert_rank") if key in point},
        "rollout": {
            "backend": "in_process" if point["kind"] == "rollout" else "server",
            "max_prompt_length": point.get("prompt_tokens", 256),
            "max_completion_length": point.get("completion_tokens", 256),
            "sync": point.get("sync", "remerge"),
            "keep_weights": point.get("keep_weights", "never"),  # points without this key were measured so
        },
        "server": server,
        "train": {
            "max_steps": 1,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": given.get("completions", micro) // micro,
            "recompute": recompute_of(point),
            "recompute_fraction": point.get("recompute_fraction", 1.0),
            "recompute_offload": point.get("recompute_offload", False),
            "micro_batch_tokens": point.get("micro_batch_tokens"),
            "beta": point.get("beta", 0.01),
        },
    }
    return config_from_dict(values)


def point_shape(point: Point) -> Shape:
    return shape_from_facts({"model_type": "qwen3"} | point["model"], point["shape"])


def rows_of(point: Point, card_name: str) -> list[Row]:
    """The figures of a point. Its sequences were all of one length, so no mask was made."""
    config, shape = point_config(point), point_shape(point)
    card = recognize(card_name, 1e9) if "NVIDIA" in card_name else CARDS["h200"]
    if point["kind"] == "server":
        parts = memory.server_parts(shape, config, card)
        server = config.server
        name = f"server {point['shape']}, {server.weights}, {config.rollout.sync}, {server.max_num_seqs} sequences"
        if config.server.enforce_eager:
            name += ", no graphs"
        return [Row(name, sum(parts.values()), point["total_gib"])]
    phases = memory.trainer_phases(shape, config, card, padded=False)
    found = max(memory.allocated(phases[phase]) for phase in ("log-probs", "update"))
    length = f"{point['prompt_tokens']} + {point['completion_tokens']}"
    name = f"trainer {point['shape']}, {point['micro_batch']} x ({length})"
    name += {"none": ", no checkpointing", "selective": ", selective"}.get(config.train.recompute, "")
    share = config.train.recompute_fraction
    name += f" of {100 * share:.0f} % of the layers" if share < 1 else ""
    name += ", offloaded" if config.train.recompute_offload else ""
    name += ", embedding on the host" if config.policy.embeddings == "host" else ""
    if (packed := config.train.micro_batch_tokens) is not None:
        name += f", packs of {packed}"
    name += "".join(f", {one}" for one in (config.policy.compute, config.policy.kernels) if one not in AS_EVER)
    name += f", rank {point['lora_rank']}" if point["lora_rank"] != 16 else ""
    if config.policy.expert_rank is not None:
        name += f", rank {config.policy.expert_rank} on experts"
    name += ", bf16 adapter" if config.policy.adapter_dtype == "bfloat16" else ""
    rows = [Row(name, found, point["peak_gib"])]
    if point["kind"] == "rollout":
        made = memory.allocated(phases["rollout"])
        rows.append(
            Row(
                f"rollout in process {point['shape']}, {point['completions']} x ({length})",
                made,
                point["rollout_peak_gib"],
            )
        )
    return rows


def compare(points: dict) -> list[Row]:
    """Every figure of every point that has no error."""
    return [row for point in points["points"] if "error" not in point for row in rows_of(point, points["card"])]


def check(path: str, as_json: bool) -> int:
    """Print predicted, measured and error; return 1 if one is off by more than 10 %."""
    points = read_object(Path(path), POINTS)
    try:
        rows = compare(points)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise BadInput(f"{path} is not what bench/memory_points.py writes: {error!r}") from None
    if not rows:
        raise BadInput(f"{path} holds no measured point.")
    worst = max(rows, key=lambda row: abs(row.error))
    if as_json:
        print(json.dumps([{**vars(row), "error": row.error} for row in rows], indent=2))
    else:
        print(f"{points['card']}, {points['date']}")
        print("| point | predicted GiB | measured GiB | error |\n|---|---|---|---|")
        for row in rows:
            print(f"| {row.name} | {row.predicted:.2f} | {row.measured:.2f} | {100 * row.error:+.1f} % |")
        print(f"{len(rows)} figures, {100 * LIMIT:.0f} % allowed; the worst: {100 * worst.error:+.1f} %, {worst.name}")
    return CHECK_FAILED if abs(worst.error) > LIMIT else DONE
