"""Sections of the report page: each function takes the files of a run and returns a section.

A section whose file is missing names the command that makes it; anything in a file beyond what is read here is
ignored.
"""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval import plots
from eval.artifacts import eval_command
from eval.compare import points
from eval.document import Block, Bullets, Commands, Missing, Picture, Section, Table, Text
from eval.found import NONE, Found, number, p_values, pair, share
from eval.naming import in_sentence, name_of, policy_name
from eval.sections_model import layers, serving, tokens, training
from kit.core.errors import KitError
from kit.core.run_directory import file_hash, read_json

SHOWN_PROBLEMS = 3
LONGEST_TEXT = 1200  # characters shown of a completion


def sections(found: Found) -> list[Section]:
    """All sections of the report, verdicts first and missing parts last."""
    made = [
        verdict(found),
        conclusion(found),
        gate(found),
        accuracy(found),
        samples(found),
        problems(found),
        tasks(found),
        training(found),
        layers(found),
        tokens(found),
        serving(found),
        endpoint(found),
        lm_eval(found),
        settings(found),
        commands(found),
    ]
    kept = [section for section in made if section is not None]
    lacking = [block for section in kept for block in section.blocks if isinstance(block, Missing)]
    if lacking:
        rows = [[block.what, block.command] for block in lacking]
        kept.append(Section("What is missing", [Table(["part", "made by"], rows)]))
    return kept


def _eval_command(found: Found) -> str:
    return eval_command(found.run, list(found.result["matrix"]["grpo"]) if found.result else None)


def verdict(found: Found) -> Section:
    """The gate's verdict, the gain and its survival in the deployed format, in one line."""
    from eval.rules import PASS

    name = (((found.config.get("config") or {}).get("eval") or {}).get("gate") or {}).get("format", "fp8")
    who, rules = f"{policy_name('grpo', found.trained)} in {name}", _rules(found)
    missed = [f"{rule.name} ({rule.verdict})" for rule in rules if rule.verdict != PASS]
    if (found.manifests.get(("dequantized", "grpo", name)) or {}).get("promoted"):
        line = f"Promoted: {who}."
    elif missed:
        line = f"Not promoted: {who} misses {len(missed)} of {len(rules)} rules of the gate: {', '.join(missed)}."
    elif rules:
        line = f"Not promoted yet: {who} meets the {len(rules)} rules that can be seen here."
    else:
        line = "Not promoted: no checkpoint was gated." if found.result else "Not promoted: nothing was evaluated."
    if gain := ((found.result or {}).get("gain") or {}).get(name):
        line += f" Gain {_with_interval(gain)} points on {gain['n']:,} problems"
        kept = found.result["gain_survival"].get(name)
        line += f", {_with_interval(kept)} against the gain in bf16." if kept else "."
    return Section("Verdict", [Text(line)])


def _with_interval(found: dict) -> str:
    value, interval = _difference(found)
    return f"{value} [{interval}]"


def conclusion(found: Found) -> Section:
    """The sentences that the evaluation generated, verbatim."""
    if found.result is None:
        return Section("Conclusion", [Missing("The held-out evaluation was not made.", _eval_command(found))])
    blocks: list[Block] = [Bullets(found.result["conclusion"].splitlines(), findings=True)]
    if remade := found.remade:
        names = ", ".join(f"{policy}/{name}" for policy, name in remade)
        what = f"What is said of accuracy was measured on other checkpoints than lie here: {names} came later."
        blocks.append(Missing(what, _eval_command(found)))
    return Section("Conclusion", blocks)


def gate(found: Found) -> Section:
    """The verdict on every rule, from the manifest that the gate wrote; without one, the rules as they stand."""
    blocks: list[Block] = []
    header = ["rule", "limit", "measured", "verdict"]
    shown = found.folder / "eval.json"
    digest = file_hash(shown) if shown.is_file() else None
    for (into, policy, name), manifest in found.manifests.items():
        promotion = manifest.get("promotion")
        if not promotion:
            continue
        verdict = "promoted" if manifest.get("promoted") else "not promoted"
        where = "" if into == "dequantized" else f", merged into the {into} base"
        other = "" if promotion.get("eval_hash") == digest else ", on another evaluation than the one shown here"
        rows = [[rule.get(column, NONE) for column in ("name", *header[1:])] for rule in promotion.get("rules", [])]
        date = promotion.get("date", NONE)
        who = policy_name(policy, found.trained)
        blocks.append(Table(header, rows, f"{who} in {name}{where}: {verdict}, {date}{other}"))
    if not blocks:
        first = "" if found.result else f"{_eval_command(found)} && "
        command = f"{first}python -m eval gate --run {found.run.as_argument}"
        blocks.append(Missing("No checkpoint is promoted.", command))
        if rules := _rules(found):
            rows = [[rule.name, rule.limit, rule.measured, rule.verdict] for rule in rules]
            blocks.append(
                Table(header, rows, "The rules as this evaluation meets them; the gate checks more than these")
            )
    return Section("Gate", blocks)


def _rules(found: Found) -> list[Any]:
    """The gate's rules applied to what was measured; empty if an input is missing or was made again."""
    from eval.rules import judge
    from kit.core.config.load import resolve

    try:
        config = resolve(found.run.config(), [], str(found.run.config_file))
        manifest = found.manifests["dequantized", "grpo", config.eval.gate.format]
        if {name for _, name in found.remade} & {config.eval.gate.format, "bf16"}:
            return []
        return judge(config, found.result, manifest)
    except (KitError, KeyError, TypeError):
        return []


def accuracy(found: Found) -> Section | None:
    """The matrix with its intervals, the gain and its survival, and the hygiene of every cell."""
    result = found.result
    if result is None:
        return None
    from eval.result import column, engines

    temperature = result.get("temperature", 0)
    decoding = f"sampled at temperature {temperature:g}, seed {result.get('seed')}" if temperature else "greedy"
    each = f"{k} completions of each" if (k := _samples(result)) > 1 else "one completion of each"
    text = (
        f"{result['n']} held-out problems, {each}, {decoding}, at most {result['max_new_tokens']} new tokens. Engine: "
        f"{engines(result['matrix'])}. Percent and points; every interval covers 95 % by itself, none is corrected "
        "for looking at several formats."
    )
    if result.get("trained_for"):
        text += f" The columns: {'; '.join(column(result, name) for name in result['matrix']['grpo'])}."
    alt = "Accuracy of base and trained policy by format, 95 % intervals, and the gain in each format minus bf16's"
    picture = Picture("accuracy", plots.svg(plots.matrix(result)), alt)
    return Section("Accuracy", [Text(text), picture, *_cell_tables(result), *_gain_tables(result)])


def _cell_tables(result: dict) -> list[Block]:
    cells = [(policy, name, cell) for policy, row in result["matrix"].items() for name, cell in row.items()]
    accuracies, hygiene = [], []
    for policy, name, cell in cells:
        start = [policy_name(policy, name_of(result)), name]
        strict, length, seconds = cell.get("strict"), cell.get("mean_tokens"), cell.get("seconds")
        accuracies.append([*start, points(cell["accuracy"]), pair(cell["interval"]), cell["correct"], share(strict)])
        accuracies[-1] += [number(length, ".1f"), number(seconds, ".1f")]
        rates = [share(cell.get(rate)) for rate in ("parse_rate", "prompt_leak_rate", "end_of_turn_rate")]
        hygiene.append([*start, *rates, cell.get("max_token_hits", NONE), cell.get("undecided", NONE)])
    header = ["policy", "format", "accuracy", "interval", "right", "boxed only", "tokens", "seconds"]
    rates = ["policy", "format", "parsed, %", "prompt leak, %", "ended, %", "cut", "undecided"]
    caption = "Hygiene: whether the accuracies mean what they say"
    return [Table(header, accuracies, "Matrix"), Table(rates, hygiene, caption)]


def _gain_tables(result: dict) -> list[Block]:
    gains, kept = [], []
    for name, gain in result["gain"].items():
        gains.append([name, *_difference(gain), *p_values(gain), *gain["discordant"]])
        gains[-1] += [points(gain["minimum_detectable_effect"]), gain["n"], gain.get("verdict", NONE)]
    for name, survival in result["gain_survival"].items():
        kept.append([name, *_difference(survival), *_difference(result["quantization_loss"][name])])
        kept[-1].append(survival.get("verdict", NONE))
    header = ["format", "gain", "interval", "p", "adjusted p", "gained", "lost", "detectable", "problems", "verdict"]
    caption = f"Gain: {name_of(result)} minus base on the same problems; detectable four times in five"
    tables: list[Block] = [Table(header, gains, caption)]
    if kept:
        lost = f"{name_of(result)} accuracy lost against bf16"
        header = ["format", "gain minus gain in bf16", "interval", lost, "interval"]
        tables.append(Table([*header, "verdict"], kept, "Survival: what the format does to the gain"))
    refused = (result.get("hygiene") or {}).get("refused") or {}
    texts = dict.fromkeys(text for found in refused.values() for listed in found.values() for text in listed)
    if texts:
        tables.append(Bullets([f"No conclusion is drawn where {text}." for text in texts]))
    return tables


def _difference(found: dict) -> list[str]:
    return [points(found["difference"], sign=True), pair(found["interval"])]


def _samples(result: dict) -> int:
    return result.get("samples_per_problem") or result.get("samples") or 1


def tasks(found: Found) -> Section | None:
    """Summary of the evaluations on other tasks."""
    rows, said = [], []
    for task, result in found.tasks.items():
        for name, gain in result["gain"].items():
            base, grpo = (result["matrix"][policy][name]["accuracy"] for policy in ("base", "grpo"))
            rows.append([task, name, points(base), points(grpo), *_difference(gain), *p_values(gain), gain["n"]])
        said += [f"{task}: {sentence}" for sentence in result["conclusion"].splitlines()]
    if not rows:
        return None
    header = [
        "task",
        "format",
        "base, %",
        f"{found.trained}, %",
        "gain, points",
        "interval",
        "p",
        "adjusted p",
        "problems",
    ]
    return Section("Other tasks", [Table(header, rows), Bullets(said)])


def endpoint(found: Found) -> Section | None:
    """The deployed endpoint compared with the evaluated cell."""
    data = found.endpoint
    if not data:
        return None
    cell, compared = data.get("cell") or {}, data.get("compared")
    row = [data.get("deployed", NONE), share(cell.get("accuracy")), pair(cell.get("interval")), data.get("n", NONE)]
    row += [*_difference(compared), share(compared.get("same"))] if compared else [NONE] * 3
    header = ["deployed", "accuracy", "interval", "problems", "minus the judged cell", "interval", "same text, %"]
    blocks: list[Block] = [Table(header, [row])]
    notes = [data["not_compared"]] if data.get("not_compared") else []
    if notes := [*notes, *(f"Out of the gate's limits: {text}" for text in data.get("out_of_limits") or [])]:
        blocks.append(Bullets(notes))
    return Section("Deployed endpoint", blocks)


def samples(found: Found) -> Section | None:
    """pass@k and maj@k, if several completions per problem were drawn."""
    gains = (found.result or {}).get("gain") or {}
    rows, curves = [], {}
    for name, gain in gains.items():
        passed = {f"pass@{k}": one for k, one in (gain.get("pass_at_k") or {}).items() if one}
        voted = gain.get("maj_at_k")
        for label, one in (passed | ({f"maj@{voted['k']}": voted} if voted else {})).items():
            rows.append([name, label, points(one["base"]), points(one["grpo"]), *_difference(one), one["n"]])
        if len(passed) > 1:
            by_k = {int(label.removeprefix("pass@")): one for label, one in passed.items()}
            curves[name] = {policy: {k: one[policy] for k, one in by_k.items()} for policy in ("base", "grpo")}
    if not rows:
        return None
    blocks: list[Block] = []
    if curves:
        alt = f"pass@k against k for base and {found.trained} in every format"
        blocks.append(Picture("samples", plots.svg(plots.several_samples(curves, found.trained)), alt))
    header = ["format", "", "base, %", f"{found.trained}, %", "difference, points", "interval", "problems"]
    text = (
        "pass@k: the chance that k completions hold a right one; maj@k: that the most frequent answer of k is right."
    )
    return Section("Several completions a problem", [Text(text), *blocks, Table(header, rows)])


def problems(found: Found) -> Section | None:
    """Some problems that only one of the two policies gets right, in the gate's format or the first one measured."""
    if found.result is None:
        return None
    names = list(found.result["matrix"]["base"])
    wanted = ((found.config.get("config") or {}).get("eval") or {}).get("gate", {}).get("format")
    name = wanted if wanted in names else names[0]
    files = {policy: found.folder / "eval" / f"{policy}-{name}.jsonl" for policy in ("base", "grpo")}
    if not all(file.is_file() for file in files.values()):
        return None
    base, grpo = ({row["problem_id"]: row for row in _first_samples(file)} for file in files.values())
    asked = _questions(found)
    blocks: list[Block] = []
    for title, better, worse in (
        (f"Only {in_sentence(found.trained)} is right", grpo, base),
        ("Only the base is right", base, grpo),
    ):
        both = [key for key in better if key in worse]
        chosen = [key for key in both if better[key]["correct"] is True and worse[key]["correct"] is False]
        if not chosen:
            continue
        rows = [
            [asked.get(key, key), base[key]["gold"], _cut(base[key]["completion"]), _cut(grpo[key]["completion"])]
            for key in chosen[:SHOWN_PROBLEMS]
        ]
        caption = f"{title}: {len(chosen)} of {len(both)} problems, the first {len(rows)}"
        blocks.append(Table(["problem", "answer", "base", found.trained], rows, caption))
    return Section(f"Problems that changed, in {name}", blocks) if blocks else None


def _first_samples(file: Path) -> Iterable[dict]:
    for text in file.read_text().splitlines():
        row = json.loads(text)
        if row.get("sample", 0) == 0:
            yield row


def _questions(found: Found) -> dict[str, str]:
    """{problem id: question} of the run's held-out problems if they are on this machine."""
    from eval.problems import held_out
    from kit.core.config.load import resolve

    try:
        config = resolve(found.run.config(), [], str(found.run.config_file))
        if config.data.path is None:  # a report does not access the network
            return {}
        return {
            problem.id: problem.question
            for problem in held_out(config.data, config.eval.max_problems, reward=config.eval.reward)
        }
    except (KitError, OSError):
        return {}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text)} characters)"


def lm_eval(found: Found) -> Section | None:
    """lm-evaluation-harness's numbers beside ours on the same checkpoints, and where the protocols differ."""
    rows, said = [], []
    for cell in ((found.lm_eval or {}).get("cells") or {}).values():
        start = [policy_name(cell["policy"], found.trained), cell["format"]]
        ours = cell["ours"]
        rows.append([*start, "ours", NONE, points(ours["accuracy"]), pair(ours["interval"]), cell["n"], NONE, NONE])
        for score in cell["harness"]:
            name, shots = f"{score['task']}, {score['filter']}", score.get("num_fewshot", NONE)
            minus = _difference(score["difference"]) if score.get("difference") else [NONE, NONE]
            rows.append([*start, name, shots, points(score["accuracy"]), pair(score["interval"]), score["n"], *minus])
        where = f"{start[0]} in {cell['format']}"
        said += [f"{where}, {task}: {text}" for task, texts in cell["differences"].items() for text in texts]
    if not rows:
        return None
    header = ["policy", "format", "measured by", "examples", "accuracy, %", "interval", "problems", "minus ours"]
    blocks: list[Block] = [Table([*header, "interval"], rows)]
    if said:
        blocks += [Text("Where the protocols differ:"), Bullets(said)]
    return Section("lm-eval beside ours", blocks)


def settings(found: Found) -> Section:
    """Facts of the run: what was trained, on what, with which versions."""
    config = found.config.get("config") or {}
    evaluated, machine = found.result or {}, found.config.get("machine") or {}
    model, policy, train, data, rollout, reward = (
        config.get(group) or {} for group in ("model", "policy", "train", "data", "rollout", "reward")
    )
    base = read_json(found.run.base_file) if found.run.base_file.is_file() else {}
    distill = config.get("distill") or {}
    teacher = distill.get("teacher_adapter") or distill.get("teacher")
    facts = {
        "run": (config.get("run") or {}).get("name", found.run.path.name),
        "base": model.get("id"),
        "base path": model.get("path"),
        "base revision": model.get("revision"),
        "base stored in (policy.quantization)": policy.get("quantization"),
        "base, content hash": base.get("hash") or evaluated.get("base_hash"),
        "adapter": _adapter(evaluated, found),
        "LoRA rank, alpha": _joined(policy.get("lora_rank"), policy.get("lora_alpha")),
        "LoRA on": policy.get("target_modules"),
        "trained for (policy.quant_cfg)": policy.get("quant_cfg"),
        "data": data.get("id") or data.get("path"),
        "rewards": ", ".join(map(str, reward.get("functions") or [])) or None,
        "teacher": teacher,
        "loss, beta": None if teacher else _joined(train.get("loss") or train.get("loss_type"), train.get("beta")),
        "divergence": distill.get("divergence") if teacher else None,
        "learning rate": train.get("learning_rate"),
        "steps": f"{found.rows[-1]['step']} of {train.get('max_steps')}" if found.rows else train.get("max_steps"),
        "group size": rollout.get("group_size"),
        "seed": found.config.get("seed"),
        "code": found.config.get("git_revision"),
        "trained on": ", ".join(machine.get("gpus") or []) or _joined(machine.get("processor"), machine.get("cores")),
        "trained": found.config.get("created"),
        "evaluated": evaluated.get("date"),
        "engine": _joined(evaluated.get("engine"), evaluated.get("compute_dtype")),
    }
    versions = {"training": found.config.get("versions") or {}, "evaluation": evaluated.get("versions") or {}}
    versions["serving"] = (found.serving or {}).get("versions") or {}
    packages = sorted({name for found_ in versions.values() for name in found_})
    blocks: list[Block] = [
        Table(["", "value"], [[name, value] for name, value in facts.items() if value not in (None, "")])
    ]
    if packages:
        rows = [[name, *(used.get(name, NONE) for used in versions.values())] for name in packages]
        blocks.append(Table(["package", *versions], rows, "Versions"))
    return Section("Run", blocks)


def _joined(*values: Any) -> str | None:
    known = [str(value) for value in values if value is not None]
    return ", ".join(known) or None


def _adapter(result: dict, found: Found) -> str | None:
    version, digest = result.get("adapter_version"), result.get("adapter_hash")
    if version is None:
        manifests = [manifest for (_, policy, _), manifest in found.manifests.items() if policy == "grpo"]
        version = manifests[0].get("adapter_version") if manifests else None
        digest = manifests[0].get("adapter_hash") if manifests else None
    return None if version is None else f"v{version}, {digest}"


def commands(found: Found) -> Section | None:
    """The command line that made each part, as recorded in its file."""
    lines = []
    for what, data in (
        ("training", found.config),
        ("evaluation", found.result),
        ("diagnostics", found.diagnostics),
        ("serving", found.serving),
        ("endpoint", found.endpoint),
        *(("lm-eval", cell) for cell in ((found.lm_eval or {}).get("cells") or {}).values()),
    ):
        command = (data or {}).get("command")
        if command:
            words = command if isinstance(command, str) else shlex.join(map(str, command))
            lines.append(f"{what}: {words}")
    formats = sorted(
        {name for _, _, name in found.manifests}, key=lambda name: plots.order([*plots.FORMATS, name]).index(name)
    )
    if formats:
        lines.insert(1, f"merge: python -m merge --run {found.run.as_argument} --format {' '.join(formats)}")
    return Section("Commands", [Commands(lines)]) if lines else None
