"""What a hanging tool costs a step, and what the servers' prefix caches save: episodes on two vLLM servers.

    python bench/episodes_servers.py               # 20 steps of each setting on two CPU cores, four minutes

The guessing game of tests/smoke/test_server_episodes.py: 16 episodes a step, at most 5 turns, a limit of 0.5 s on a
call; the tool that hangs takes 4 s. Prints a row per setting. Exits with 1 if episodes waited for the tools of others:
a step's longest wait in an environment is then above what its calls can take one after another.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.errors import run_command
from kit.core.run_directory import RunDir
from tests import processes
from tests.conftest import LAUNCH
from tests.smoke.test_server_episodes import TOOL_S, TURNS, Setup, game_servers

PLAYS, HANGS = "recipes.environments.guess:GuessNumber", "tests.smoke.hanging_guess:HangingGuess"
SETTINGS = [(game, overlap) for game in (PLAYS, HANGS) for overlap in ("false", "true")]
WARM = 2  # steps left out: the first waits for servers that were idle


def measure(setup: Setup, folder: Path, game: str, overlap: str, steps: int) -> dict:
    """Run the recipe with one setting; return the figures of a row."""
    run = RunDir(folder / f"{game.rpartition(':')[2]}-{overlap}")
    cached = [
        {name: server.metric(f"prefix_cache_{name}") for name in ("hits", "queries")} for server in setup.servers
    ]
    changes = {"environment": game, "rollout.overlap": overlap, "train.max_steps": steps, "train.save_steps": steps}
    command = [*LAUNCH, "recipes/grpo_qlora.py", *setup.arguments(run, changes)]
    done = processes.run(command)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    rows = [json.loads(line) for line in run.metrics_file.read_text().splitlines()][WARM:]
    hits, queries = (
        sum(
            server.metric(f"prefix_cache_{name}") - old[name]
            for server, old in zip(setup.servers, cached, strict=True)
        )
        for name in ("hits", "queries")
    )
    seconds = {
        name: statistics.median(row["seconds"].get(name, 0.0) for row in rows)
        for name in ("step", "rollout", "rollout_hidden", "environment")
    }
    return {
        "seconds": seconds,
        "longest": max(row["seconds"]["environment"] for row in rows),
        "failures": statistics.mean(row["tool_failures"] for row in rows),
        "calls": statistics.mean(row["tool_calls"] for row in rows),
        "lag": statistics.mean(row["turn_lag"] for row in rows),
        "turns": statistics.mean(row["episode_turns"] for row in rows),
        "cached": hits / queries,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20, help="steps of each setting")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr), game_servers(Path(folder)) as setup:
            found = {setting: measure(setup, Path(folder), *setting, options.steps) for setting in SETTINGS}
    print("| tool | overlap | s a step | rollout | behind the update | longest wait | calls | failed | lag | cached |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (game, overlap), row in found.items():
        s = row["seconds"]
        print(
            f"| {'hangs in 5 %' if game == HANGS else 'answers'} | {overlap} | {s['step']:.2f} | {s['rollout']:.2f} "
            f"| {s['rollout_hidden']:.2f} | {row['longest']:.2f} | {row['calls']:.2f} | {row['failures']:.2f} "
            f"| {row['lag']:.0f} | {100 * row['cached']:.0f} % |"
        )
    if any(row["longest"] > TURNS * (TOOL_S + 1) for row in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
