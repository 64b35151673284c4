"""`python -m launch.server canary`: replicas scored by hand against what the trainer wrote with its last sync."""

import os
from pathlib import Path
from typing import Any

import pytest

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import write_json
from kit.rollout.canary import write_canary
from launch.replica_canary import check_replicas, newest_canary
from tests.conftest import CONFIG
from tests.unit.fake_replica import FakeReplica, log_probs

SEQUENCES, BASE = [[5, 6, 7, 8], [9, 10, 11]], "ab" * 32  # the stand-ins' base


@pytest.fixture
def replicas():
    made = [FakeReplica(), FakeReplica()]
    for one in made:
        one.served = "s", 2
    yield made
    for one in made:
        one.stop()


@pytest.fixture
def checked(replicas, tmp_path, capsys):
    """`checked(limit)`: (exit code, what was printed) of the check of both replicas, whose trainer is at version 2."""
    write(tmp_path, "s", 2)

    def check(limit: float = 0.05) -> tuple[int, str]:
        urls = [one.url for one in replicas]
        keys = [f"--run.output_dir={tmp_path}", f"--rollout.server_urls={urls}", f"--server.base={tmp_path}/base"]
        code = check_replicas(load_config(CONFIG, [*keys, f"--rollout.max_canary_delta={limit}"]))
        return code, capsys.readouterr().out

    return check


def write(run: Path, session: str, version: int, age_s: float = 0.0) -> None:
    (run / "sync" / session).mkdir(parents=True)
    path = run / "sync" / session / "canary.json"
    scores = {
        "policy": [log_probs(ids, version) for ids in SEQUENCES],
        "base": [log_probs(ids, 0) for ids in SEQUENCES],
    }
    write_canary(path, session=session, version=version, way="remerge", sequences=SEQUENCES, **scores)
    os.utime(path, (os.stat(path).st_mtime - age_s,) * 2)


def test_replicas_that_are_the_policy_pass_and_their_distances_are_printed(checked, replicas):
    code, said = checked()
    assert code == 0 and "error" not in said
    assert said.count("k3 0, |Δlogp| mean 0 max 0 over 5 tokens; from the base 0.4, the adapter shifts 0.4") == 2
    assert f"{replicas[0].url} against {replicas[1].url}: |Δlogp| mean 0 max 0" in said


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"holds": 0}, "it serves the base without this adapter"),
        ({"holds": 3}, "nats a token (max 0.2), limit"),
        ({"served": ("other", 2)}, "it serves other/2, the trainer's canary is s/2"),
        ({"served": ("s", 1)}, "it serves s/1, the trainer's canary is s/2"),
        ({"served": None}, "it serves the base, the trainer's canary is s/2"),
    ],
)
def test_a_replica_that_is_not_the_policy_fails_by_name(checked, replicas, facts, complaint):
    for key, value in facts.items():
        setattr(replicas[1], key, value)
    code, said = checked(0.1 if facts.get("holds") == 3 else 1.0)
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert code == 1 and any(complaint in line and replicas[1].url in line for line in errors), said
    assert not any(line.startswith(f"error: {replicas[0].url}: ") for line in errors)


@pytest.mark.parametrize(("runs", "directorys", "code"), [(BASE, None, 0), ("cd" * 32, None, 1), (None, "cd" * 32, 1),
                                                          (BASE, "cd" * 32, 0), ("cd" * 32, BASE, 1)])  # fmt: skip
def test_the_base_is_that_of_the_run_or_else_of_the_directory(checked, tmp_path, runs, directorys, code):
    (tmp_path / "base").mkdir()
    for folder, content in ((tmp_path, runs), (tmp_path / "base", directorys)):
        if content:
            write_json(folder / "base.json", {"hash": content})
    found, said = checked()
    assert found == code and ("it holds the base" in said) == bool(code)


def test_replicas_that_differ_from_each_other_fail_whichever_way_they_differ(checked, replicas, monkeypatch):
    """Each within the limit of the trainer's scores, on either side of them, token by token."""
    from kit.rollout.protocol import decode_ids, encode_floats

    for replica, sign in zip(replicas, (1, -1), strict=True):

        def score(body: dict, sign: int = sign) -> dict:
            found = [log_probs(decode_ids(text), 2) for text in body["sequences"]]
            for one in found:
                one[::2] += sign * 0.04
                one[1::2] -= sign * 0.04
            return {"version": 2, "logprobs": [encode_floats(one) for one in found]}

        replica.before["score"] = score  # fmt: skip
    code, said = checked(0.05)
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert code == 1 and error.endswith("differ by 0.08 nats per token."), said


def test_a_replica_with_noise_is_shown_and_not_held_to_the_limit(checked, replicas, monkeypatch):
    info = FakeReplica.do_info

    def noisy(self: FakeReplica, body: Any, query: dict) -> tuple[int, dict]:
        status, facts = info(self, body, query)
        return status, facts | {"noise": {"sigma": 0.01, "seed": 1}}

    monkeypatch.setattr(FakeReplica, "do_info", noisy)
    for one in replicas:
        one.holds = 3
    code, said = checked(0.05)
    assert code == 0 and said.count("its norms have noise of 0.01") == 2


def test_the_newest_canary_of_a_run_is_taken(tmp_path):
    with pytest.raises(BadInput, match="holds no sync"):
        newest_canary(tmp_path)
    for session, age_s in (("b", 50), ("a", 10), ("c", 90)):
        write(tmp_path, session, 1, age_s)
    assert newest_canary(tmp_path).parent.name == "a"
