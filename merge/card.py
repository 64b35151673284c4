"""The README.md of a merged checkpoint: a model card with its origin, its training and its measurements.

`python -m merge card --run X` rewrites the cards of a run once there is an evaluation, and can upload them. A card is
made from the run directory alone. The manifest does not list it, because it changes when the checkpoint does not.
"""

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kit.core import file_kinds
from kit.core.config.base_rules import CALLED
from kit.core.errors import DONE, BadInput
from kit.core.formats import FORMATS
from kit.core.gguf_types import GGUF_TYPES, PREFIX
from kit.core.installed import installed_versions
from kit.core.one_line import as_paragraph, in_markdown
from kit.core.run_directory import INTO, MANIFEST, RunDir, manifest_as_written, read_manifest
from kit.core.run_files import read_object
from merge import hub
from merge.card_usage import usage
from merge.command import POLICIES
from merge.tables import markdown_table

CARD = "README.md"
MADE_OF, OF_ADAPTER = ("policy", "format", "base_hash", "verify"), ("adapter_version", "adapter_hash")  # of a manifest
GRPO, DISTILLED, SUPERVISED, IMPORTED = "GRPO", "distilled", "fine-tuned", "imported"  # how a policy was trained
WINDOW = 10  # steps averaged in a mean of the training metrics
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "safetensors", "compressed-tensors")
LOSS: tuple[str, ...] = (
    "train.loss_type",
    "train.loss",
    "train.beta",
    "train.kl_in_reward",
    "train.epsilon",
    "train.epsilon_high",
)
LOSS += ("train.delta", "train.importance_sampling_level", "train.entropy_coef", "rollout.correction")
TEACHER = ("distill.teacher", "distill.teacher_adapter")
DISTILLATION = (*TEACHER, "distill.divergence", "distill.temperature")
FINE_TUNING = ("sft.rows", "sft.loss_on")
# What is known of an adapter that another program trained.
ADAPTER = (
    "run.imported_from",
    "policy.quantization",
    "policy.double_quantization",
    "policy.lora_rank",
    "policy.lora_alpha",
    "policy.use_rslora",
    "policy.target_modules",
)
RECIPE = (
    "train.max_steps",
    "train.learning_rate",
    "train.lr_scheduler",
    "train.num_iterations",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "rollout.backend",
    "rollout.group_size",
    "rollout.temperature",
    "rollout.max_prompt_length",
    "rollout.max_completion_length",
    "rollout.stop",
    "reward.functions",
    "reward.weights",
    "policy.quantization",
    "policy.double_quantization",
    "policy.quant_cfg",
    "policy.lora_rank",
    "policy.lora_alpha",
    "policy.use_rslora",
    "policy.target_modules",
    "policy.init_adapter",
    "run.seed",
)
DATA: tuple[str, ...] = (
    "id",
    "config",
    "path",
    "train_split",
    "eval_split",
    "eval_path",
    "answer_format",
    "system_prompt",
)
DATA = (*DATA, "format", "prompt_suffix", "chat_template_kwargs", "max_train_problems")
METRICS: tuple[str, ...] = (
    "reward",
    "reward_std",
    "divergence",
    "kl",
    "entropy",
    "zero_spread_fraction",
    "truncated_fraction",
)
METRICS += ("token_accuracy", "heldout_loss", "heldout_token_accuracy")
METRICS += ("completion_length",)


def main(argv: list[str]) -> int:
    """Rewrite the cards of a run's checkpoints; with --push_to_hub, upload those checkpoints."""
    names = (*FORMATS, *(f"{PREFIX}{kind}" for kind in GGUF_TYPES))
    parser = argparse.ArgumentParser(prog="python -m merge card", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="run directory, e.g. runs/tiny")
    parser.add_argument(
        "--into", choices=INTO, default=INTO[0], help="checkpoints of which base; default: dequantized"
    )
    parser.add_argument("--out", type=Path, help="where they are, if `python -m merge` was given --out")
    parser.add_argument("--format", nargs="+", choices=names, help="default: all that exist")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: both")
    add_hub_options(parser)
    arguments = parser.parse_args(argv)
    run = RunDir.open(arguments.run)
    top = arguments.out or run.merged_into(arguments.into)
    places = {
        (policy, name): top / policy / name
        for policy in POLICIES
        for name in names
        if policy in arguments.policy and (arguments.format is None or name in arguments.format)
    }
    found = {key: place for key, place in places.items() if (place / MANIFEST).is_file()}
    if not found:
        into = "" if arguments.into == INTO[0] else f" --into {arguments.into}"
        out = f" --out {shlex.quote(str(arguments.out))}" if arguments.out else ""
        raise BadInput(
            f"no merged checkpoint of that choice in {top}. Make one with: python -m merge --run {run.as_argument} "
            f"--format {' '.join(name for name in arguments.format or () if name in FORMATS) or 'bf16'}{into}{out}"
        )
    for (_, name), place in found.items():
        read_manifest(place, "checkpoint" if name in FORMATS else "gguf", deep=True)
    if arguments.push_to_hub:
        hub.check_access(arguments.push_to_hub)
    for place in found.values():
        print(f"wrote {write_card(run, place)}", flush=True)
    if arguments.push_to_hub:
        push_all(arguments, found)
    return DONE


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--push_to_hub",
        metavar="REPO_ID",
        help="upload the policy's checkpoints to this repository, several formats to REPO_ID-<format>; HF_TOKEN",
    )
    parser.add_argument("--hub_private", action="store_true", help="create repositories as private")


def push_all(arguments: argparse.Namespace, places: dict[tuple[str, str], Path]) -> None:
    """Upload checkpoints and print their addresses."""
    for place, repo_id in hub.destinations(arguments.push_to_hub, places).items():
        print(f"uploading {place} to {repo_id}", flush=True)
        print(f"uploaded: {hub.push(place, repo_id, arguments.hub_private)}", flush=True)


def write_card(run: RunDir, directory: Path) -> Path:
    """Write the card of a published checkpoint atomically and return its path."""
    manifest = manifest_as_written(directory)
    needed = [*MADE_OF, *(OF_ADAPTER if manifest.get("policy") == "grpo" else ())]
    if missing := [key for key in needed if key not in manifest]:
        raise BadInput(f"{directory / MANIFEST} has no {missing[0]}, which its card names. {file_kinds.MANIFEST.fix}")
    text = render(run, manifest)
    temporary = directory / f".{CARD}.{os.getpid()}.tmp"
    try:
        temporary.write_text(text)
        os.replace(temporary, directory / CARD)
    finally:
        temporary.unlink(missing_ok=True)
    return directory / CARD


def render(run: RunDir, manifest: dict) -> str:
    """Return the card as Markdown, with the front matter that the hub reads."""
    facts = run.facts()
    config, base = facts["config"], run.base()
    parts = [
        front_matter(config, manifest),
        introduction(config, manifest),
        usage(manifest),
        origin(config, base, manifest),
        table("## Recipe", ("key", "value"), settings(config, recipe(config))) if manifest["policy"] == "grpo" else "",
        table("## Data", ("key", "value"), settings(config, [f"data.{key}" for key in DATA]))
        if has_data(config)
        else "",
        training(run, manifest) if manifest["policy"] == "grpo" else "",
        serving(manifest),
        checks(config, manifest),
        evaluation(run, manifest),
        software(facts, manifest),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def look_up(config: dict, key: str) -> Any:
    """Value of a dotted key; None if it is not set."""
    group, leaf = key.split(".")
    return (config.get(group) or {}).get(leaf)


def storage(config: dict) -> str:
    """policy.quantization of the run."""
    return look_up(config, "policy.quantization") or "nf4"


def is_distilled(config: dict) -> bool:
    """Whether the run learned from a teacher rather than from rewards."""
    return any(look_up(config, key) for key in TEACHER)


def is_supervised(config: dict) -> bool:
    """Whether the run learned from demonstrations (recipes/sft_qlora.py)."""
    return look_up(config, "sft.rows") is not None


def has_data(config: dict) -> bool:
    """Whether the run names any problems; an imported adapter may come without."""
    return any(look_up(config, f"data.{key}") for key in ("id", "path", "eval_path"))


def is_imported(config: dict) -> bool:
    """Whether another program trained the adapter (`python -m merge import`)."""
    return bool(look_up(config, "run.imported_from"))


def trained_by(config: dict) -> str:
    """Display name of a run's policy by how it was trained: GRPO, distilled, fine-tuned, or imported."""
    if is_imported(config):
        return IMPORTED
    if is_supervised(config):
        return SUPERVISED
    return DISTILLED if is_distilled(config) else GRPO


def recipe(config: dict) -> tuple[str, ...]:
    """Configuration keys that describe how the adapter was trained."""
    if is_imported(config):
        return ADAPTER
    if is_supervised(config):
        return (*FINE_TUNING, *(key for key in RECIPE if not key.startswith("rollout.")))
    return (*(DISTILLATION if is_distilled(config) else LOSS), *RECIPE)


def settings(config: dict, keys: Iterable[str]) -> list[tuple[str, str]]:
    """Rows for those of `keys` that are set."""
    return [(key, code(value)) for key in keys if (value := look_up(config, key)) not in (None, "", {}, [])]


def code(value: Any) -> str:
    """A value as inline code, escaped for a table cell."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "`" + json.dumps(text)[1:-1].replace('\\"', '"').replace("|", "\\|").replace("`", "'") + "`"


def table(title: str, head: tuple[str, ...], rows: list[tuple]) -> str:
    """A titled Markdown table; empty without rows."""
    if not rows:
        return ""
    return "\n".join([title, "", *markdown_table(head, rows)])


def front_matter(config: dict, manifest: dict) -> str:
    """YAML front matter for the hub; strings are written as JSON, which is valid YAML."""
    library = "gguf" if gguf_type(manifest) else "transformers"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    if HUB_ID.fullmatch(model := str(look_up(config, "model.id"))):
        relation = "finetune" if manifest["format"] in ("bf16", f"{PREFIX}bf16") else "quantized"
        lines += [f"base_model: {json.dumps(model)}", f"base_model_relation: {relation}"]
    data = str(look_up(config, "data.id"))
    if look_up(config, "data.path") is None and HUB_ID.fullmatch(data) and manifest["policy"] == "grpo":
        lines += ["datasets:", f"- {json.dumps(data)}"]
    method = {GRPO: ["grpo"], DISTILLED: ["distillation"], SUPERVISED: ["sft"], IMPORTED: []}[trained_by(config)]
    learned = "qlora" if storage(config) == "nf4" else "lora"
    tags = [*method, learned] if manifest["policy"] == "grpo" else []
    tags += ["quantization-aware"] if manifest.get("trained_for") == manifest["format"] and tags else []
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in [*tags, json.dumps(manifest["format"])]), "---"])


def introduction(config: dict, manifest: dict) -> str:
    model, name = (in_markdown(look_up(config, key)) for key in ("model.id", "run.name"))
    form = manifest["format"]
    dequantized = manifest.get("into", INTO[0]) == INTO[0]
    called = CALLED[storage(config)]
    weights = "its original weights"
    if dequantized and storage(config) != "none":
        weights = f"its weights rounded to {called} and back"
    what = f"{model}, with {weights}: the base of run {name} without its adapter"
    if manifest["policy"] == "grpo":
        how = {DISTILLED: "on-policy distillation", SUPERVISED: "supervised fine-tuning"}.get(trained_by(config), GRPO)
        base = f"an {called} base" + (" (QLoRA)" if storage(config) == "nf4" else "")
        trained = f"trained with {how} on {base} in run {name}"
        if is_imported(config):
            trained = (
                f"with an adapter that another program trained, "
                f"{in_markdown(Path(str(look_up(config, 'run.imported_from'))).name)}"
            )
        what = f"{model} {trained}; the adapter is merged into {weights}"
    aware = quantization_aware(manifest)
    reader = FORMATS[form].stores if form in FORMATS else in_markdown(form)
    if kind := gguf_type(manifest):
        reader = f"llama.cpp, Ollama and others that take GGUF; {GGUF_TYPES[kind].stores}"
    policy = IMPORTED if is_imported(config) and manifest["policy"] == "grpo" else manifest["policy"]
    return f"# {name}, {in_markdown(policy)}, {in_markdown(form)}\n\n{what}.{aware}\n\nRead by {reader}."


def gguf_type(manifest: dict) -> str:
    """Type of a GGUF file's weights; empty for a checkpoint."""
    return str(manifest["format"]).removeprefix(PREFIX) if manifest.get("kind") == "gguf" else ""


def quantization_aware(manifest: dict) -> str:
    """A sentence, with a leading space, on the format that the run was trained for; empty for other runs."""
    if (own := manifest.get("trained_for")) is None:
        return ""
    text = f" The training was quantization-aware: the policy computed with the numbers of {in_markdown(own)}"
    if own == manifest["format"]:
        return f"{text}, which is what this checkpoint stores."
    return f"{text}. This checkpoint is {in_markdown(manifest['format'])}, which it was not trained for."


def origin(config: dict, base: dict, manifest: dict) -> str:
    """Table of what the weights are made from, by name and by hash."""
    rows = [
        ("model", code(look_up(config, "model.id"))),
        ("revision", code(base.get("revision")) if base.get("revision") else "–"),
        ("merged into", in_markdown(f"{manifest.get('into', INTO[0])} base")),
        (f"{CALLED[storage(config)]} base, BLAKE2b", code(manifest["base_hash"])),
    ]
    if manifest["policy"] == "grpo":
        rows += [("adapter version", code(manifest["adapter_version"]))]
        rows += [("adapter hash", code(manifest["adapter_hash"]))]
    if arguments := manifest.get("chat_template_kwargs"):
        rows += [("chat template", f"the model's, with the training's arguments as defaults: {code(arguments)}")]
    rows += [("license", "that of the base model")]
    return table("## Made from", ("what", "value"), rows)


def serving(manifest: dict) -> str:
    """What a server must be told to end completions where the policy did; empty without stop texts."""
    if not (stop := manifest.get("stop")):
        return ""
    return (
        f"## Serving\n\nCompletions end at the first of {code(stop)}, in training and evaluation. No file of the "
        "checkpoint tells a server: send `stop` with every request, and to vLLM `include_stop_str_in_output: true` to "
        "keep the text in the answer. With transformers pass `stop_strings` and `tokenizer` to `generate`."
    )


def training(run: RunDir, manifest: dict) -> str:
    """Table of the mean metrics at the start and at the end of the adapter's training."""
    last, rows = manifest.get("adapter_version"), []
    try:
        rows = [row for row in run.metrics() if last is None or row["step"] <= last]
    except BadInput:
        return "## Training\n\nThe run's metrics.jsonl cannot be read."
    if not rows:
        return ""

    def mean(some: list[dict], key: str) -> str:
        values = [row[key] for row in some if isinstance(row.get(key), int | float)]
        return f"{sum(values) / len(values):.4g}" if values else "–"

    first, end = rows[:WINDOW], rows[-WINDOW:]
    start, finish = (in_markdown(f"steps {rows[0]['step']} to {rows[-1]['step']}") for rows in (first, end))
    head = ("metric, mean", start, finish)
    shown = [key for key in METRICS if any(key in row for row in rows)]
    return table("## Training", head, [(key, mean(first, key), mean(end, key)) for key in shown])


def checks(config: dict, manifest: dict) -> str:
    """How close the checkpoint is to the policy, and how much of the update its format keeps."""
    if gguf_type(manifest):
        return gguf_checks(manifest)
    found, kept = manifest.get("verify"), manifest.get("retained_update")
    lines = ["## Against the trained policy", ""]
    if found is None:
        lines.append("Not compared.")
    else:
        whose = "" if is_imported(config) else " of the run's own sequences"
        lines.append(
            f"On {found['tokens']} tokens{whose}: mean KL(policy‖this) {found['mean_kl']:.2e} "
            f"nats per token, max |Δlogp| {found['max_abs_dlogp']:.3f}, top-1 agreement {found['top1_agreement']:.3f}."
        )
    if kept is not None:
        lines.append(f"The stored weights keep {kept:.2%} of the adapter's update.")
    elif reason := manifest.get("no_retained_update"):
        lines.append(f"The share of the adapter's update that is kept was not computed: {in_markdown(reason)}.")
    if found and (to := found.get("policy_with")):
        lines.append(f"The policy computed with {in_markdown(to)} there.")
    if calibration := manifest.get("calibration"):
        if "quantizers" in calibration:
            lines.append(f"Activation scales come from the training's quantizers, {code(calibration)}.")
            return "\n".join(lines)
        whose = "the prompts that the import was given" if is_imported(config) else "the run's training prompts"
        lines.append(f"Calibrated on {whose}: {code(calibration)}.")
    return "\n".join(lines)


def gguf_checks(manifest: dict) -> str:
    """How close llama.cpp on the file is to transformers on the BF16 checkpoint, and that to the policy."""
    lines = ["## Against the merged BF16 checkpoint", ""]
    if (found := manifest["verify"]) is None:
        lines.append("Not compared.")
    else:
        lines.append(
            f"llama.cpp with this file against transformers with the BF16 checkpoint, on {found['tokens']} tokens: "
            f"mean KL {found['mean_kl']:.2e} nats per token, max |Δlogp| {found['max_abs_dlogp']:.3f}, top-1 "
            f"agreement {found['top1_agreement']:.3f}. Tokens and rendered prompts are equal."
        )
    if merged := manifest.get("verify_bf16"):
        lines.append(f"The BF16 checkpoint against the policy: mean KL {merged['mean_kl']:.2e}.")
    return "\n".join(lines)


def evaluation(run: RunDir, manifest: dict) -> str:
    """The run's eval.json as a table if it is of this base and adapter; otherwise why not, or how to get it."""
    title = "## Evaluation\n\n"
    if not run.eval_file.is_file():
        return f"{title}Not evaluated yet. `python -m eval` measures it, `python -m merge card` then fills this in."
    try:
        result = read_object(run.eval_file, file_kinds.EVALUATION)
    except BadInput:
        return f"{title}The run's eval.json holds no result."
    same_adapter = manifest["policy"] == "base" or result.get("adapter_hash") == manifest["adapter_hash"]
    if result.get("base_hash") != manifest["base_hash"] or not same_adapter:
        version = in_markdown(result.get("adapter_version"))
        return f"{title}The run's evaluation is of another adapter (version {version})."
    if manifest.get("into", INTO[0]) != result.get("into", INTO[0]):
        into = in_markdown(result.get("into", INTO[0]))
        return f"{title}The run's evaluation is of checkpoints merged into the {into} base."
    policies = [policy for policy in POLICIES if policy in result["matrix"]]
    formats = [name for name in FORMATS if any(name in result["matrix"][policy] for policy in policies)]
    rows = [
        (name, *(_accuracy(result["matrix"][policy].get(name)) for policy in policies), _gain(result, name))
        for name in formats
    ]
    promoted = ["Promoted by the run's evaluation gate."] if manifest.get("promoted") else []
    text = table(title.strip(), ("format", *(f"{policy}, accuracy" for policy in policies), "gain"), rows)
    said = as_paragraph(f"{result.get('n')} held-out problems, 95 % intervals, {result.get('date')}.")
    return "\n\n".join([text, said, *promoted, *map(as_paragraph, str(result.get("conclusion") or "").splitlines())])


def _accuracy(cell: dict | None) -> str:
    if not cell:
        return "–"
    low, high = cell["interval"]
    return f"{cell['accuracy']:.1%} ({low:.1%} to {high:.1%})"


def _gain(result: dict, name: str) -> str:
    if not (found := (result.get("gain") or {}).get(name)):
        return "–"
    low, high = found["interval"]
    return f"{100 * found['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"


def software(facts: dict, manifest: dict) -> str:
    """Table of the package versions at training and at merging."""
    trained, merged = facts.get("versions") or {}, installed_versions(PACKAGES)
    names = [*merged, *(name for name in trained if name not in merged)]
    rows = [tuple(map(in_markdown, (name, trained.get(name, "–"), merged.get(name, "–")))) for name in names]
    made = f"Merged {in_markdown(manifest.get('created'))}."
    if revision := facts.get("git_revision"):
        made += f" Code of the training: {code(revision)}."
    if text := facts.get("never_measured"):
        made += f" Trained with versions that the kit was never measured with: {in_markdown(text)}."
    then = "import" if is_imported(facts["config"]) else "training"
    return table("## Versions", ("package", then, "this card"), rows) + f"\n\n{made}"
