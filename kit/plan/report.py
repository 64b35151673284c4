"""A plan as text in a terminal, as a few lines for another command, and as JSON."""

import dataclasses
import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from kit.core.config import speculation_rules
from kit.plan import cost, fitting, memory, quantized, splitting, teacher
from kit.plan.fitting import Layout
from kit.plan.memory import Estimate
from kit.plan.recompute import describe_recompute
from kit.plan.sharding import LOADING
from kit.plan.sizes import Keys
from kit.plan.splitting import Split

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def spell(keys: Keys) -> str:
    """Spell keys as on a command line."""

    def word(value: object) -> str:
        return shlex.quote(value if isinstance(value, str) else json.dumps(value))

    return " ".join(f"--{key} {word(value)}" for key, value in keys.items())


def _range(one: Estimate) -> str:
    return f"{one.expected:.1f} ({one.low:.1f} to {one.high:.1f})"


def verdict(layout: Layout) -> str:
    """One sentence: whether it fits, with the figures of the card that has the least room."""
    worst = layout.worst
    numbers = f"{worst.name}: {_range(worst.peak)} of {worst.limit_gib:.1f} GiB"
    if not layout.fits:
        return "It does not fit. " + " ".join([*layout.faults, numbers + "."])
    if any(one.verdict == "tight" for one in layout.cards):
        return f"It fits, tightly: the high estimate exceeds the GPU. {numbers}."
    return f"It fits. {numbers}."


def title(layout: Layout) -> str:
    shape, config = layout.shape, layout.config
    cards = f"{layout.count} x {layout.card.name}" if layout.count else "a CPU"
    trainer = f"{layout.processes} trainer process{'es' * (layout.processes > 1)}"
    trainer += " that split the base" * (LOADING in layout.trainer)
    server = f", {layout.replicas} server{'s' * (layout.replicas > 1)}" if layout.replicas else ", rollouts in process"
    length = f"{config.rollout.max_prompt_length} + {config.rollout.max_completion_length} tokens"
    completions = "completions"
    if config.sft.is_given:
        server, completions = "" if server.startswith(", roll") else server, "rows"
    chosen = f"; {describe_recompute(config)} (auto)" if layout.chose else ""
    weights = f"{shape.parameters / 1e9:.2f} B weights"
    if shape.experts is not None:
        weights += f", {shape.active_parameters / 1e9:.2f} B active"
    return (
        f"{shape.name} ({weights}) on {cards}: {trainer}{server}; "
        f"{layout.completions} {completions} per step, {length}{chosen}"
    )


def counted(layout: Layout) -> str | None:
    """Sentences on the cost of a format, kept weights, drafts and a teacher; None without any of them."""
    shape, config, card, found = layout.shape, layout.config, layout.card, []
    arguments = (shape, config, card, math.ceil(layout.completions / layout.processes))
    timed = layout.count and cost.can_estimate(card)
    if fmt := quantized.format_of(config):
        served = f", served as {config.server.weights}" if layout.replicas else ""
        seconds = f", {cost.format_seconds(*arguments):.2f} s of an update" if timed else ""
        size = quantized.weight_gib(shape, config, card)
        found.append(
            f"Trained for {fmt.name}{served}: each weight is quantized for its matmul, then released "
            f"(the largest takes {size:.2f} GiB{seconds})."
        )
    if kept := layout.trainer.get("rollout", {}).get(memory.KEPT):
        found.append(f"Rollouts keep dequantized weights, each made once: {kept:.2f} GiB.")
    if layout.server is not None and (drafts := speculation_rules.wanted(config.server)):
        said = f"{layout.server[memory.DRAFTS]:.2f} GiB for their logits"
        passes = ""
        if config.server.speculation in speculation_rules.BY_MODEL:
            gib = layout.server.get(memory.DRAFT_MODEL)
            unread = "; the draft cannot be read here, its weights and KV cache are not counted"
            said += unread if gib is None else f", {gib:.2f} GiB for the draft's weights"
            passes = ", and count no pass of the draft"
        found.append(
            f"Replicas decode speculatively, {speculation_rules.called(drafts)}: {said}. Seconds assume that none is "
            f"accepted{passes}."
        )
    if layout.server is not None and memory.FLASHINFER in layout.server:
        found.append(
            f"Replicas with FlashInfer's kernels serve an FP8 KV cache of twice the sequences (server.kv_cache "
            f"{config.server.kv_cache}). Counted: the model's dtype, and "
            f"{layout.server[memory.FLASHINFER]:.2f} GiB of FlashInfer's buffers."
        )
    if who := teacher.describe(config):
        seconds = f" ({cost.teacher_seconds(*arguments):.2f} s)" if timed else ""
        own, theirs = teacher.head_products(config)
        found.append(
            f"Distilled from {who}: an update has a pass of the teacher{seconds}, its last hidden states, {own} "
            f"matmuls with the student's head and {theirs} with the teacher's, no reference. Counted, not measured."
        )
    return " ".join(found) or None


def summary(layout: Layout) -> str:
    """Title, verdict and, when it does not fit, what would make it fit."""
    lines = [title(layout), *filter(None, [counted(layout)]), verdict(layout)]
    if not layout.fits:
        lines.append(_advice(layout))
    return "\n".join(lines)


def _advice(layout: Layout, changes: list[fitting.Change] | None = None) -> str:
    keys = fitting.remedy(layout, changes)
    if keys is None:
        if not layout.count:
            other = "Plan it for GPUs with --gpu, e.g. --gpu h200:2."
        else:
            cards = ", ".join(fitting.cards_that_fit(layout))
            other = f"It fits unchanged on as many {cards}." if cards else "It fits no GPU of the table unchanged."
        return f"No change of the configuration that the plan knows makes it fit these GPUs. {other}"
    return f"This would fit: {spell(keys)}"


def report(layout: Layout) -> None:
    """Print the whole plan."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    console.print(title(layout), style="bold")
    if text := counted(layout):
        console.print(text)
    console.print(_cards_table(layout))
    console.print(_parts_table(layout))
    color = "green" if layout.fits else "red"
    console.print(verdict(layout), style=color)
    _print_largest(console, layout)
    if not layout.fits or any(one.verdict == "tight" for one in layout.cards):
        _print_changes(console, layout)
    _print_times(console, layout)
    if layout.count:
        _print_precision(console, layout)


def _table(title: str, *columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _cards_table(layout: Layout) -> "Table":
    table = _table("GiB by GPU and phase", "GPU", "phase", "low", "expected", "high", "of", "")
    grouped: dict[tuple, list[str]] = {}
    for one in layout.cards:
        key = (tuple(one.roles), tuple(one.phases.items()), one.limit_gib, one.verdict)
        grouped.setdefault(key, []).append(one.name)
    for (roles, phases, limit, said), names in grouped.items():
        label = f"{_together(names)}, {' and '.join(dict.fromkeys(roles))}"
        for phase, one in phases:
            row = [label, phase, f"{one.low:.1f}", f"{one.expected:.1f}", f"{one.high:.1f}", f"{limit:.1f}"]
            table.add_row(*row, said if one == max((e for _, e in phases), key=lambda e: e.expected) else "")
            label = ""
    return table


def _together(names: list[str]) -> str:
    """Join names: GPU 0, GPU 1, GPU 2 to GPU 0 to 2; to GPU 0, 2 if one in between is missing."""
    numbers = [name.rpartition(" ")[2] for name in names]
    if len(names) == 1:
        return names[0]
    follows = int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1
    return f"GPU {numbers[0]} to {numbers[-1]}" if follows else f"GPU {', '.join(numbers)}"


def _parts_table(layout: Layout) -> "Table":
    """Table of the parts of the trainer's update and of a server."""
    table = _table("of that, GiB", "trainer, update", "", "server, each GPU", "")
    trainer = [(name, f"{gib:.2f}") for name, gib in layout.trainer["update"].items() if gib >= 0.005]
    server = [(name, f"{gib:.2f}") for name, gib in (layout.server or {}).items() if gib >= 0.005]
    table.columns[2].justify = "left"
    for number in range(max(len(trainer), len(server))):
        left = trainer[number] if number < len(trainer) else ("", "")
        right = server[number] if number < len(server) else ("", "")
        table.add_row(*left, *right)
    return table


def largest(layout: Layout) -> dict[str, int | None]:
    """The largest micro-batch, completion and number of sequences that fit, each with the rest as configured."""
    if layout.config.train.micro_batch_tokens is None:
        found: dict[str, int | None] = {"micro_batch": fitting.largest_micro_batch(layout)}
    else:
        found = {"micro_batch_tokens": fitting.largest_pack(layout)}
    found["completion_tokens"] = fitting.largest_completion(layout)
    if layout.server is not None:
        found |= {"sequences": fitting.largest_sequences(layout), "sequences_now": fitting.sequences(layout)}
    return found


def _most(what: str, largest: int | None, unit: str, now: int) -> str:
    return f"{what} {largest}{unit} (now {now})" if largest else f"no {what} fits (now {now}{unit})"


def _print_largest(console: "Console", layout: Layout) -> None:
    found, config = largest(layout), layout.config
    if "micro_batch" in found:
        micro = _most("micro-batch", found["micro_batch"], "", config.train.per_device_train_batch_size)
    else:
        micro = _most("pack", found["micro_batch_tokens"], " tokens", config.train.micro_batch_tokens)
    named = [
        micro,
        _most("completion", found["completion_tokens"], " tokens", config.rollout.max_completion_length),
    ]
    if layout.server is not None:
        text = f"the KV cache holds {found['sequences_now']} sequences of full length"
        if found["sequences"] is not None and found["sequences"] != found["sequences_now"]:
            text += f", the card has memory for {found['sequences'] or 'none'}"
        named.append(f"{text} (server.max_num_seqs {config.server.max_num_seqs})")
    console.print("Largest that fits, the rest as it is: " + "; ".join(named) + ".")


def _print_changes(console: "Console", layout: Layout) -> None:
    table = _table("Change first, each alone", "set", "saves GiB", "fits then", "price")
    table.columns[3].justify = "left"
    changes = fitting.changes(layout)
    for one in changes:
        table.add_row(spell(one.keys), f"{one.saves_gib:.1f}", "yes" if one.then_fits else "no", one.price)
    if table.row_count:
        console.print(table)
    if not layout.fits:
        console.print(_advice(layout, changes))


def time_rows(layout: Layout) -> list[Split]:
    """The ways to split the cards; empty on a CPU and on a card of unknown speed."""
    if not layout.count or not cost.can_estimate(layout.card):
        return []
    return splitting.splits(layout)


def _hours(layout: Layout, time: cost.StepTime) -> str:
    low, high = (layout.config.train.max_steps * seconds / 3600 for seconds in (time.low, time.high))
    return f"{low:.1f} - {high:.1f}"


def _print_times(console: "Console", layout: Layout) -> None:
    if not (rows := time_rows(layout)):
        why = "a CPU" if not layout.count else f"{layout.card.name}, whose speed is not in the table"
        console.print(f"Times are not estimated for {why}.")
        return
    header = (
        f"Expected seconds per step ({layout.completions} completions, all of full length), and hours for "
        f"{layout.config.train.max_steps} steps"
    )
    table = _table(header, "GPUs", "rollout", "update", "step", "hours", "memory")
    now = fitting.step_time(layout)
    serving = layout.replicas * layout.config.server.tensor_parallel
    mark = _use(layout.processes, serving, layout.count) + " (now)"
    table.add_row(mark, *_seconds(now), _hours(layout, now), "fits" if layout.fits else "does not fit")
    for one in rows[:5]:
        if (one.trainers, one.servers) == (layout.processes, serving) and abs(one.time.step / now.step - 1) < 0.01:
            continue
        name = _use(one.trainers, one.servers, layout.count)
        table.add_row(name, *_seconds(one.time), _hours(layout, one.time), "fits" if one.fits else "does not fit")
    console.print(table)
    best = next((one for one in rows if one.fits), None)
    if best is not None and (not layout.fits or best.time.step < 0.97 * now.step):
        console.print(f"The fastest that fits: {spell(best.keys)}", style="green")
    elif best is not None:
        console.print("No other split that fits is faster.")


def _use(trainers: int, servers: int, count: int) -> str:
    """How many cards train and how many serve, in words; they may be the same ones."""
    if trainers == servers == count > 1:
        return f"{count} train and serve"
    return f"{trainers} train" + (f", {servers} serve" if servers else ", in process")


def _seconds(time: cost.StepTime) -> list[str]:
    return [f"{value:.1f}" for value in (time.rollout, time.update, time.step)]


def _print_precision(console: "Console", layout: Layout) -> None:
    left_out = "weights, optimizer and activations; no KV cache, context or CUDA graphs"
    title = f"Without quantization, GiB of all cards ({left_out})"
    table = _table(title, "", "GiB", f"{layout.card.name} cards at least")
    for name, gib in memory.full_precision(layout.shape, layout.config, layout.card).items():
        table.add_row(name, f"{gib:.0f}", str(math.ceil(gib / layout.card.gib)))
    console.print(table)


def as_json(layout: Layout) -> dict[str, Any]:
    """Everything that `report` prints."""
    rows, changes = time_rows(layout), fitting.changes(layout)
    now = fitting.step_time(layout) if rows else None
    return {
        "model": dataclasses.asdict(layout.shape)
        | {"parameters": layout.shape.parameters, "active_parameters": layout.shape.active_parameters},
        "card": dataclasses.asdict(layout.card),
        "count": layout.count,
        "trainer_processes": layout.processes,
        "replicas": layout.replicas,
        "completions": layout.completions,
        "fits": layout.fits,
        "problems": layout.faults,
        "counted": counted(layout),
        "gpus": [dataclasses.asdict(one) | {"verdict": one.verdict} for one in layout.cards],
        "trainer_gib": layout.trainer,
        "server_gib": layout.server,
        "largest": largest(layout),
        "changes": [dataclasses.asdict(one) for one in changes],
        "remedy": fitting.remedy(layout, changes),
        "seconds": dataclasses.asdict(now) | {"step": now.step} if now else None,
        "splits": [dataclasses.asdict(one) | {"step": one.time.step} for one in rows],
        "full_precision_gib": memory.full_precision(layout.shape, layout.config, layout.card),
    }
