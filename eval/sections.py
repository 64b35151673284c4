"""Sections of the report page: each function takes the files of a run and returns a section.

A section whose file is missing names the command that makes it; anything in a file beyond what is read here is
ignored. `accuracy` and `samples` need only an eval.json: they are also what eval.md is made of.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from eval import plots
from eval.artifacts import eval_command
from eval.compare import points
from eval.document import Block, Bullets, Commands, Missing, Picture, Section, Table, Text
from eval.found import NONE, Found, cells_of, change, number, p_values, pair, share
from eval.naming import in_sentence, name_of, policy_name
from eval.problems import held_out
from eval.result import column, engines, run_config
from eval.rules import PASS, Rule, judge
from eval.sections_model import layers, serving, tokens, training
from kit.core.errors import KitError
from kit.core.file_kinds import RECORDS
from kit.core.run_directory import file_hash
from kit.core.run_files import read_lines

SHOWN_PROBLEMS = 3
LONGEST_TEXT = 1200  # characters shown of a completion


def sections(found: Found) -> list[Section]:
    """All sections of the report, verdicts first and missing parts last."""
    made = [verdict(found), conclusion(found), gate(found)]
    if found.result is not None:
        made += [accuracy(found.result, matrix_picture(found.result))]
        made += [samples(found.result, samples_pictures(found.result)), problems(found)]
    made += [tasks(found), training(found), layers(found), tokens(found), serving(found), endpoint(found)]
    made += [lm_eval(found), settings(found), commands(found)]
    kept = [section for section in made if section is not None]
    lacking = [[one.what, one.command] for section in kept for one in section.blocks if isinstance(one, Missing)]
    return [*kept, Section("What is missing", [Table(["part", "made by"], lacking)])] if lacking else kept


def _table(header: str, rows: list, caption: str = "") -> Table:
    """A table whose columns are named in one string, separated by bars."""
    return Table(header.split("|"), rows, caption)


def _eval_command(found: Found) -> str:
    return eval_command(found.run, list(found.result["matrix"]["grpo"]) if found.result else None)


def verdict(found: Found) -> Section:
    """The gate's verdict, the gain and its survival in the deployed format, in one line."""
    name = found.gate_format or "fp8"
    who, rules = f"{policy_name('grpo', found.trained)} in {name}", _rules(found)
    missed = [f"{rule.name} ({rule.verdict})" for rule in rules if rule.verdict != PASS]
    if (found.manifests.get(("dequantized", "grpo", name)) or {}).get("promoted"):
        line = f"Promoted: {who}."
    elif missed:
        line = f"Not promoted: {who} misses {len(missed)} of {len(rules)} rules of the gate: {', '.join(missed)}."
    elif rules:
        line = f"Not promoted yet: {who} meets the {len(rules)} rules that can be checked here."
    else:
        line = "Not promoted: no checkpoint was gated." if found.result else "Not promoted: nothing was evaluated."
    if gain := ((found.result or {}).get("gain") or {}).get(name):
        line += " Gain {} [{}] points on {:,} problems".format(*change(gain), gain["n"])
        kept = found.result["gain_survival"].get(name)
        line += ", {} [{}] against the gain in bf16.".format(*change(kept)) if kept else "."
    return Section("Verdict", [Text(line)])


def conclusion(found: Found) -> Section:
    """The sentences that the evaluation generated, verbatim."""
    if found.result is None:
        return Section("Conclusion", [Missing("The held-out evaluation was not made.", _eval_command(found))])
    blocks: list[Block] = [Bullets(found.result["conclusion"].splitlines(), findings=True)]
    if remade := found.remade:
        names = ", ".join(f"{policy}/{name}" for policy, name in remade)
        what = f"The accuracies were measured on other checkpoints than those in the run: {names} came later."
        blocks.append(Missing(what, _eval_command(found)))
    return Section("Conclusion", blocks)


def gate(found: Found) -> Section:
    """The verdict on every rule, from the manifest that the gate wrote; without one, the rules as they stand."""
    blocks: list[Block] = []
    header = ["rule", "limit", "measured", "verdict"]
    shown = found.folder / "eval.json"
    digest = file_hash(shown) if shown.is_file() else None
    for (into, policy, name), manifest in found.manifests.items():
        if promotion := manifest.get("promotion"):
            rows = [[rule.get(key, NONE) for key in ("name", *header[1:])] for rule in promotion.get("rules", [])]
            who = f"{policy_name(policy, found.trained)} in {name}"
            where = "" if into == "dequantized" else f", merged into the {into} base"
            said = "promoted" if manifest.get("promoted") else "not promoted"
            other = "" if promotion.get("eval_hash") == digest else ", by another evaluation than the one shown here"
            blocks.append(Table(header, rows, f"{who}{where}: {said}, {promotion.get('date', NONE)}{other}"))
    if not blocks:
        first = "" if found.result else f"{_eval_command(found)} && "
        command = f"{first}python -m eval gate --run {found.run.as_argument}"
        blocks.append(Missing("No checkpoint is promoted.", command))
        if rules := _rules(found):
            rows = [[rule.name, rule.limit, rule.measured, rule.verdict] for rule in rules]
            blocks.append(Table(header, rows, "The rules for this evaluation; the gate checks more than these"))
    return Section("Gate", blocks)


def _rules(found: Found) -> list[Rule]:
    """The gate's rules applied to what was measured; empty if an input is missing or was made again."""
    try:
        config = run_config(found.run, [])
        manifest = found.manifests["dequantized", "grpo", config.eval.gate.format]
        if {name for _, name in found.remade} & {config.eval.gate.format, "bf16"}:
            return []
        return judge(config, found.result, manifest)
    except (KitError, KeyError, TypeError):
        return []


def matrix_picture(result: dict) -> Picture:
    """The plot of accuracies and survival, as SVG."""
    alt = "Accuracy of base and trained policy by format, 95 % intervals, and the gain in each format minus bf16's"
    return Picture("accuracy.svg", plots.svg(plots.matrix(result)), alt)


def accuracy(result: dict, picture: Picture) -> Section:
    """The matrix with its intervals, the gain and its survival, and the hygiene of every cell."""
    temperature = result.get("temperature", 0)
    decoding = f"sampled at temperature {temperature:g}, seed {result.get('seed')}" if temperature else "greedy"
    completions = result.get("samples_per_problem") or result.get("samples") or 1
    each = f"{completions} completions of each" if completions > 1 else "one completion of each"
    text = (
        f"{result['n']} held-out problems, {each}, {decoding}, at most {result['max_new_tokens']} new tokens. Engine: "
        f"{engines(result['matrix'])}. Accuracies, rates and differences are in percent and points; each interval "
        "covers 95 % by itself, none is corrected for several formats."
    )
    return Section("Accuracy", [Text(text), picture, *_cell_tables(result), *_gain_tables(result)])


def _cell_tables(result: dict) -> list[Table]:
    rows = [
        ([policy_name(policy, name_of(result)), column(result, name)], cell)
        for (policy, name), cell in cells_of(result).items()
    ]
    accuracies = [
        [
            *start,
            *(points(cell["accuracy"]), pair(cell["interval"]), cell.get("correct", NONE), share(cell.get("strict"))),
            *(number(cell.get("mean_tokens"), ".1f"), number(cell.get("seconds"), ".1f")),
        ]
        for start, cell in rows
    ]
    hygiene = [
        [
            *start,
            *(share(cell.get(key)) for key in ("parse_rate", "prompt_leak_rate", "end_of_turn_rate")),
            *(cell.get(key, NONE) for key in ("max_token_hits", "undecided")),
        ]
        for start, cell in rows
    ]
    caption = "Hygiene: whether the accuracies can be trusted"
    return [
        _table("policy|format|accuracy|interval|right|boxed only|tokens|seconds", accuracies, "Matrix"),
        _table("policy|format|parsed, %|prompt leak, %|ended, %|cut|undecided", hygiene, caption),
    ]


def _gain_tables(result: dict) -> list[Block]:
    who = name_of(result)
    gains = [
        [
            *(column(result, name), *change(gain), *p_values(gain), *gain["discordant"]),
            *(points(gain["minimum_detectable_effect"]), gain["n"], gain.get("verdict", NONE)),
        ]
        for name, gain in result["gain"].items()
    ]
    kept = [
        [column(result, name), *change(kept), *change(result["quantization_loss"][name]), kept.get("verdict", NONE)]
        for name, kept in result["gain_survival"].items()
    ]
    header = "format|gain|interval|p|adjusted p|gained|lost|detectable|problems|verdict"
    caption = f"Gain: {who} minus base on the same problems; detectable four times in five"
    tables: list[Block] = [_table(header, gains, caption)]
    if kept:
        header = f"format|gain minus gain in bf16|interval|{who} accuracy lost against bf16|interval|verdict"
        tables.append(_table(header, kept, "Survival: the gain in each format"))
    refused = (result.get("hygiene") or {}).get("refused") or {}
    texts = dict.fromkeys(text for found in refused.values() for listed in found.values() for text in listed)
    if texts:
        tables.append(Bullets([f"No conclusion is drawn where {text}." for text in texts]))
    return tables


def samples(result: dict, pictures: Sequence[Picture] = ()) -> Section | None:
    """pass@k and maj@k, if several completions per problem were drawn."""
    rows, who = [], name_of(result)
    for name, gain in result["gain"].items():
        measured = {f"pass@{k}": one for k, one in _passed(gain).items()}
        if voted := gain.get("maj_at_k"):
            measured[f"maj@{voted['k']}"] = voted
        rows += [
            [name, label, points(one["base"]), points(one["grpo"]), *change(one), one["n"]]
            for label, one in measured.items()
        ]
    text = (
        "pass@k: the chance that k completions include a correct one; maj@k: that the most frequent of k is correct."
    )
    table = _table(f"format||base, %|{who}, %|difference, points|interval|problems", rows)
    return Section("Several completions per problem", [Text(text), *pictures, table]) if rows else None


def samples_pictures(result: dict) -> list[Picture]:
    """The plot of pass@k against k, where several k were measured."""
    who, curves = name_of(result), {}
    for name, gain in result["gain"].items():
        if len(passed := _passed(gain)) > 1:
            curves[name] = {policy: {k: one[policy] for k, one in passed.items()} for policy in ("base", "grpo")}
    alt = f"pass@k against k for base and {who} in every format"
    return [Picture("samples.svg", plots.svg(plots.several_samples(curves, who)), alt)] if curves else []


def _passed(gain: dict) -> dict[int, dict]:
    """{k: pass@k} where it was measured."""
    return {int(k): one for k, one in (gain.get("pass_at_k") or {}).items() if one}


def tasks(found: Found) -> Section | None:
    """Summary of the evaluations on other tasks."""
    rows, said = [], []
    for task, result in found.tasks.items():
        for name, gain in result["gain"].items():
            accuracies = [points(result["matrix"][policy][name]["accuracy"]) for policy in ("base", "grpo")]
            rows.append([task, name, *accuracies, *change(gain), *p_values(gain), gain["n"]])
        said += [f"{task}: {sentence}" for sentence in result["conclusion"].splitlines()]
    header = f"task|format|base, %|{found.trained}, %|gain, points|interval|p|adjusted p|problems"
    return Section("Other tasks", [_table(header, rows), Bullets(said)]) if rows else None


def endpoint(found: Found) -> Section | None:
    """The deployed endpoint compared with the evaluated cell."""
    if not (data := found.endpoint):
        return None
    cell, compared = data.get("cell") or {}, data.get("compared")
    row = [data.get("deployed", NONE), share(cell.get("accuracy")), pair(cell.get("interval")), data.get("n", NONE)]
    row += [*change(compared), share((compared or {}).get("same"))]
    header = "deployed|accuracy|interval|problems|minus the evaluated cell|interval|same text, %"
    blocks: list[Block] = [_table(header, [row])]
    notes = [data["not_compared"]] if data.get("not_compared") else []
    if notes := [*notes, *(f"Outside the gate's limits: {text}" for text in data.get("out_of_limits") or [])]:
        blocks.append(Bullets(notes))
    return Section("Deployed endpoint", blocks)


def problems(found: Found) -> Section | None:
    """Some problems that only one of the two policies gets right, in the gate's format or the first one measured."""
    names = list(found.result["matrix"]["base"])
    name = found.gate_format if found.gate_format in names else names[0]
    files = [found.folder / "eval" / f"{policy}-{name}.jsonl" for policy in ("base", "grpo")]
    if not all(file.is_file() for file in files):
        return None
    base, grpo = ({row["problem_id"]: row for row in _first_samples(file)} for file in files)
    asked, blocks = _questions(found), []
    for who, better, worse in ((in_sentence(found.trained), grpo, base), ("the base", base, grpo)):
        both = [key for key in better if key in worse]
        chosen = [key for key in both if better[key]["correct"] is True and worse[key]["correct"] is False]
        rows = [
            [asked.get(key, key), base[key]["gold"], _cut(base[key]["completion"]), _cut(grpo[key]["completion"])]
            for key in chosen[:SHOWN_PROBLEMS]
        ]
        caption = f"Only {who} is right: {len(chosen)} of {len(both)} problems, the first {len(rows)}"
        if rows:
            blocks.append(Table(["problem", "answer", "base", found.trained], rows, caption))
    return Section(f"Problems that changed, in {name}", blocks) if blocks else None


def _first_samples(file: Path) -> Iterable[dict]:
    return (row for row in read_lines(file, RECORDS) if row.get("sample", 0) == 0)


def _questions(found: Found) -> dict[str, str]:
    """{problem id: question} of the run's held-out problems if they are on this machine."""
    try:
        config = run_config(found.run, [])
        if config.data.path is None:  # a report does not access the network
            return {}
        asked = held_out(config.data, config.eval.max_problems, reward=config.eval.reward)
        return {problem.id: problem.question for problem in asked}
    except (KitError, OSError):
        return {}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text)} characters)"


def lm_eval(found: Found) -> Section | None:
    """lm-evaluation-harness's numbers next to ours on the same checkpoints, and where the protocols differ."""
    rows, said = [], []
    for cell in ((found.lm_eval or {}).get("cells") or {}).values():
        start = [policy_name(cell["policy"], found.trained), cell["format"]]
        ours = cell["ours"]
        rows.append([*start, "ours", NONE, points(ours["accuracy"]), pair(ours["interval"]), cell["n"], NONE, NONE])
        for score in cell["harness"]:
            name, shots = f"{score['task']}, {score['filter']}", score.get("num_fewshot", NONE)
            figures = [points(score["accuracy"]), pair(score["interval"]), score["n"]]
            rows.append([*start, name, shots, *figures, *change(score.get("difference"))])
        where = " in ".join(start)
        said += [f"{where}, {task}: {text}" for task, texts in cell["differences"].items() for text in texts]
    if not rows:
        return None
    header = "policy|format|measured by|examples|accuracy, %|interval|problems|minus ours|interval"
    differing: list[Block] = [Text("Where the protocols differ:"), Bullets(said)] if said else []
    return Section("lm-eval next to ours", [_table(header, rows), *differing])


def settings(found: Found) -> Section:
    """Facts of the run: what was trained, on what, with which versions."""
    evaluated, machine = found.result or {}, found.config.get("machine") or {}
    names = ("run", "model", "policy", "train", "data", "rollout", "reward", "distill")
    run, model, policy, train, data, rollout, reward, distill = map(found.group, names)
    base = found.run.base() if found.run.base_file.is_file() else {}
    teacher = distill.get("teacher_adapter") or distill.get("teacher")
    steps = train.get("max_steps")
    facts = {
        "run": run.get("name", found.run.path.name),
        "base": model.get("id"),
        "base path": model.get("path"),
        "base revision": model.get("revision"),
        "base stored in (policy.quantization)": policy.get("quantization"),
        "base, content hash": base.get("hash") or evaluated.get("base_hash"),
        "adapter": _adapter(found),
        "LoRA rank, alpha": _joined(policy.get("lora_rank"), policy.get("lora_alpha")),
        "LoRA on": policy.get("target_modules"),
        "trained for (policy.quant_cfg)": policy.get("quant_cfg"),
        "data": data.get("id") or data.get("path"),
        "rewards": _joined(*reward.get("functions") or []),
        "teacher": teacher,
        "loss, beta": None if teacher else _joined(train.get("loss") or train.get("loss_type"), train.get("beta")),
        "divergence": distill.get("divergence") if teacher else None,
        "learning rate": train.get("learning_rate"),
        "steps": f"{found.rows[-1]['step']} of {steps}" if found.rows else steps,
        "group size": rollout.get("group_size"),
        "seed": found.config.get("seed"),
        "code": found.config.get("git_revision"),
        "trained on": _joined(*machine.get("gpus") or [machine.get("processor"), machine.get("cores")]),
        "trained": found.config.get("created"),
        "versions never measured": found.config.get("never_measured"),
        "evaluated": evaluated.get("date"),
        "engine": _joined(evaluated.get("engine"), evaluated.get("compute_dtype")),
    }
    sources = {"training": found.config, "evaluation": evaluated, "serving": found.serving or {}}
    versions = {what: source.get("versions") or {} for what, source in sources.items()}
    known = [[name, value] for name, value in facts.items() if value not in (None, "")]
    blocks: list[Block] = [Table(["", "value"], known)]
    if packages := sorted({name for used in versions.values() for name in used}):
        rows = [[name, *(used.get(name, NONE) for used in versions.values())] for name in packages]
        blocks.append(Table(["package", *versions], rows, "Versions"))
    return Section("Run", blocks)


def _joined(*values: object) -> str | None:
    return ", ".join(str(value) for value in values if value is not None) or None


def _adapter(found: Found) -> str | None:
    """Version and hash of the adapter that was evaluated, else of the one that was merged."""
    merged = [manifest for (_, policy, _), manifest in found.manifests.items() if policy == "grpo"]
    sources = [found.result or {}, *merged[:1]]
    known = next((source for source in sources if source.get("adapter_version") is not None), None)
    return f"v{known['adapter_version']}, {known.get('adapter_hash')}" if known else None


def commands(found: Found) -> Section | None:
    """The command line that made each part, as recorded in its file."""
    sources = [("training", found.config), ("evaluation", found.result), ("diagnostics", found.diagnostics)]
    sources += [("serving", found.serving), ("endpoint", found.endpoint)]
    sources += [("lm-eval", cell) for cell in ((found.lm_eval or {}).get("cells") or {}).values()]
    lines = []
    for what, data in sources:
        if command := (data or {}).get("command"):
            lines.append(f"{what}: {command if isinstance(command, str) else shlex.join(map(str, command))}")
    if formats := plots.order({name for _, _, name in found.manifests}):
        lines.insert(1, f"merge: python -m merge --run {found.run.as_argument} --format {' '.join(formats)}")
    return Section("Commands", [Commands(lines)]) if lines else None
