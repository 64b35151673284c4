"""Rows of bench_step.py: read from our metrics, aggregated from steps, printed beside stock's.

python bench/step/step_table.py first.json second.json  # rows of several calls in one table
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from workload import PEAK_FLOPS, Work, step_flops

PHASES = ("step", "generate", "sync", "logps", "update")


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Our steps under stock's names; the first has no step before it to be timed from, so its own seconds count."""
    if not file.is_file():
        return []
    rows, found = [json.loads(line) for line in whole_lines(file)], []
    for place, row in enumerate(rows):
        parts = row["seconds"]
        step = row["time"] - rows[place - 1]["time"] if place else parts["step"]
        one = {"number": row["step"], "step": step, "generate": parts["rollout"] - parts["sync"]}
        one |= {"sync": parts["sync"], "logps": parts.get("reference", 0.0), "update": parts["update"]}
        one |= {"peak_gib": max(row["peak_gib"].values()), "completion_tokens": row["completion_tokens"]}
        one |= {
            "hidden": parts.get("rollout_hidden", 0.0),
            "k3": row["sampler_k3"],
            "seconds": parts,
            "kl": row["kl"],
            "grad_norm": row["grad_norm"],
        }
        found.append(one)
    return found


def whole_lines(file: Path) -> list[str]:
    """Lines of a file that is still being written, without an unterminated last one."""
    return file.read_text(errors="replace").split("\n")[:-1]


def read_rows(log: Path) -> list[dict[str, Any]]:
    """Stock's steps, read from its log."""
    return [json.loads(line[4:]) for line in whole_lines(log) if line.startswith("ROW ")]


def figures(steps: list[dict[str, Any]], load: Work, shape: dict[str, Any], cards: int) -> dict[str, Any]:
    """Medians over the steps that count, for a trainer on this many cards."""
    wrong = {one["completion_tokens"] for one in steps} - {sum(load.lengths)}
    problem = f"{sorted(wrong)} completion tokens, {sum(load.lengths)} were wanted" if wrong else None
    prompts = load.completions * load.prompt  # ours counts only completions
    if longer := {found for one in steps if (found := one.get("prompt_tokens", prompts)) != prompts}:
        problem = f"{sorted(longer)} prompt tokens, {prompts} were wanted"
    found = {name: statistics.median(one.get(name, 0.0) for one in steps) for name in PHASES}
    found["range"] = [ends(one["step"] for one in steps) for ends in (min, max)]
    busy = found["update"] + found["logps"]
    found |= {"steps": len(steps), "update_tok_s": load.tokens / found["update"], "all": steps}
    # Behind the update the sampler works for longer than the trainer waits.
    sampling = statistics.median(one["generate"] + one.get("hidden", 0.0) for one in steps)
    found |= {"rollout_tok_s": sum(load.lengths) / sampling if sampling else 0.0}
    found |= {"mfu": step_flops(shape, load) / busy / PEAK_FLOPS / cards}
    found |= {"peak_gib": max(one["peak_gib"] for one in steps), "k3": steps[-1].get("k3")}
    return found | {"problem": problem}


def earlier_rows(file: Path | None) -> list[dict[str, Any]]:
    """Stock's rows from another call."""
    return [row for row in json.loads(file.read_text())["rows"] if row["side"] == "stock"] if file else []


def table(rows: list[dict[str, Any]], earlier: Path | None) -> None:
    """Print every row by load, with its ratio to the mean of that load's stock rows, preferably those of `stock`."""
    others = earlier_rows(earlier)
    width = max([len(row["side"]) for row in rows] + [4])
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = [row for row in rows if row["load"] == load]
        stock = [row for row in mine if row["side"] == "stock" and "step" in row]
        stock = stock or [row for row in others if row["load"] == load and "step" in row]
        stock = stock or [row for row in mine if row["side"].startswith("stock") and "step" in row][:1]
        print_load(load, mine, stock, width)
        sides = dict.fromkeys(row["side"] for row in mine)
        pooled = [over_rounds([row for row in mine if row["side"] == side]) for side in sides]
        if len(pooled) < len(mine):
            ran = [row for row in pooled if row["side"].startswith("stock") and "step" in row]
            stock = [row for row in ran if row["side"] == "stock"] or ran[:1] or stock
            print_load(f"{load}, medians of the rounds", pooled, stock, width)


def over_rounds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for all rounds of a side: their medians, the peaks, and all steps; the last round if none ran."""
    ran = [row for row in rows if "step" in row]
    if not ran:
        return rows[-1]
    names = (*PHASES, "rollout_tok_s", "update_tok_s", "mfu")
    found = ran[-1] | {name: statistics.median(row[name] for row in ran) for name in names}
    found |= {"steps": sum(row["steps"] for row in ran), "peak_gib": max(row["peak_gib"] for row in ran)}
    found["range"] = [ends(row["range"][place] for row in ran) for place, ends in enumerate((min, max))]
    return found | {"problem": next((row["problem"] for row in ran if row["problem"]), None)}


def print_load(load: str, rows: list[dict[str, Any]], stock: list[dict[str, Any]], width: int) -> None:
    base_s = statistics.mean(row["step"] for row in stock) if stock else None
    base_gib = statistics.mean(row["peak_gib"] for row in stock) if stock else None
    print(
        f"\nwork {load}\n"
        f"{'side':<{width}} {'step s':>8}{'x stock':>8}{'gen':>7}{'sync':>6}{'refs':>7}{'upd':>7}{'roll tok/s':>11}"
        f"{'upd tok/s':>10}{'mfu':>6}{'trainer':>8}{'x stock':>8}{'card 0':>8}{'server':>8}{'k3':>9}"
    )

    def gib(value: float | None) -> str:
        return f"{value:8.2f}" if value is not None else f"{'-':>8}"

    for row in rows:
        if "step" not in row:
            print(f"{row['side']:<{width}}  {row.get('error', '').splitlines()[-1][:140]}")
            continue
        faster = f"{base_s / row['step']:8.2f}" if base_s else f"{'-':>8}"
        smaller = f"{row['peak_gib'] / base_gib:8.2f}" if base_gib else f"{'-':>8}"
        phases = f"{row['generate']:7.2f}{row['sync']:6.2f}{row['logps']:7.2f}{row['update']:7.2f}"
        speed = f"{row['rollout_tok_s']:11,.0f}{row['update_tok_s']:10,.0f}{row['mfu']:6.1%}"
        k3 = f"{row['k3']:9.1e}" if row["k3"] is not None else f"{'-':>9}"
        memory = gib(row["peak_gib"]) + smaller + gib(row["card_gib"]) + gib(row["server_gib"])
        note = "  {} steps of {:.2f} to {:.2f} s".format(row["steps"], *row["range"])
        note += f", {row['problem']}" if row["problem"] else ""
        print(f"{row['side']:<{width}} {row['step']:8.2f}{faster}{phases}{speed}{memory}{k3}{note}")


def efficiencies(rows: list[dict[str, Any]]) -> None:
    """Print tokens per second per trainer and replica, relative to the first row of the same load."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "step" in row:
            one = first.setdefault(row["load"], row)
            update = row["update_tok_s"] / one["update_tok_s"] * one["trainers"] / row["trainers"]
            rollout = row["rollout_tok_s"] / one["rollout_tok_s"] * one["replicas"] / row["replicas"]
            print(f"{row['load']} {row['side']}: update efficiency {update:.0%}, rollout efficiency {rollout:.0%}")


if __name__ == "__main__":
    table([row for file in sys.argv[1:] for row in json.loads(Path(file).read_text())["rows"]], None)
