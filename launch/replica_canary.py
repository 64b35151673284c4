"""Compare replicas with the trainer's scores: the check after every sync, by hand and without loading a model."""

import itertools
from pathlib import Path

import numpy as np

from kit.core.config.schema import Config
from kit.core.errors import CHECK_FAILED, DONE, BadInput
from kit.core.file_kinds import BASE_HASH
from kit.core.run_directory import base_directory
from kit.core.run_files import is_there, read_object
from kit.rollout.canary import compare, read_canary
from kit.rollout.protocol import Served
from kit.rollout.replica import Replica, ReplicaError


def check_replicas(config: Config) -> int:
    """Print how far every replica is from the trainer and from the others; return 1 if one is out of bounds.

    Reads the run's newest canary and the base's hash, and asks each replica for both.
    """
    path = newest_canary(config.run.directory)
    facts, wanted = read_canary(path), expected_base(config)
    session, version = facts["session"], facts["version"]
    print(f"{path}: version {version} of session {session}, {len(facts['sequences'])} sequences")
    scores: dict[str, list[np.ndarray]] = {}
    failed = []
    for url in config.rollout.server_urls:
        client = Replica(url, config.rollout.request_timeout_s)
        try:
            info = client.info()
            if wanted is not None and info["base_hash"] != wanted:
                raise ReplicaError(url, "info", f"it holds the base {info['base_hash']}, the run's is {wanted}")
            served = info["served"]
            if served is None or (served["session"], served["version"]) != (session, version):
                raise ReplicaError(
                    url, "info", f"it serves {_name(served)}, the trainer's canary is {session}/{version}"
                )
            scores[url] = client.score(facts["sequences"], session, version)
        except ReplicaError as error:
            failed.append(f"{error}")
            continue
        finally:
            client.close()
        result = compare(scores[url], facts["policy"], facts["base"])
        noise = info.get("noise")
        print(
            f"{url} ({served['way']}): k3 {result.k3:.3g}, |Δlogp| mean {result.mean:.3g} max {result.max:.3g} over "
            f"{result.tokens} tokens; from the base {result.to_base:.3g}, the adapter shifts {result.shift:.3g}: "
            f"nearest is {result.nearest}"
            + (f"; its norms have noise of {noise['sigma']:.3g}, the trainer's have none" if noise else "")
        )
        # The trainer compared it before noise was added; the limit applies to replicas that should equal the policy.
        if noise:
            continue
        if why := result.problem(config.rollout.max_canary_delta):
            failed.append(f"{url}: {why}.")
    for (one, first), (other, second) in itertools.combinations(scores.items(), 2):
        apart = np.abs(np.concatenate(first) - np.concatenate(second))
        print(f"{one} against {other}: |Δlogp| mean {apart.mean():.3g} max {apart.max():.3g}")
        if not apart.mean() <= config.rollout.max_canary_delta:
            failed.append(f"{one} and {other} differ by {apart.mean():.3g} nats per token.")
    for text in failed:
        print(f"error: {text}")
    return CHECK_FAILED if failed else DONE


def newest_canary(run: Path) -> Path:
    """Path of the newest canary that the run's trainer wrote."""
    found = sorted(run.glob("sync/*/canary.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BadInput(
            f"{run} holds no sync/*/canary.json: the trainer writes it with its first sync to a server, unless "
            "rollout.canary_prompts is 0."
        )
    return found[-1]


def expected_base(config: Config) -> str | None:
    """Hash of the run's base, or of the base directory if the run has not written one; None without either."""
    for folder in (config.run.directory, base_directory(config)):
        if is_there(folder / "base.json"):
            return read_object(folder / "base.json", BASE_HASH)["hash"]
    return None


def _name(served: Served | None) -> str:
    return f"{served['session']}/{served['version']}" if served else "the base"
