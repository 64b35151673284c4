"""Settings that conflict with `server.speculation`, speculative decoding on the rollout servers. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from kit.core.config.schema import Config, ServerConfig
from kit.core.draft_checkpoint import draft_directory

BY_MODEL = ("draft_model", "eagle", "eagle3")  # methods that draft with weights of their own, server.draft_model


def faults(config: Config) -> list[str]:
    """Errors about `server.speculation` and `server.draft_model`; empty if they are valid or not given."""
    server, rollout = config.server, config.rollout
    found: list[str] = []
    if server.draft_model is not None and server.speculation not in BY_MODEL:
        found.append(
            f"server.draft_model is {server.draft_model} and server.speculation {server.speculation}, which loads no "
            f"checkpoint. Set server.speculation to {_or(BY_MODEL)}, or leave server.draft_model out."
        )
    if server.speculation == "none":
        return found
    key = f"server.speculation is {server.speculation}"
    if rollout.backend != "server":
        found.append(
            f"{key} with rollout.backend {rollout.backend}: only servers draft tokens. Set it to none, or "
            "rollout.backend to server."
        )
    if server.speculation == "ngram" and server.ngram_min > server.ngram_max:
        found.append(
            f"server.ngram_min ({server.ngram_min}) is above server.ngram_max ({server.ngram_max}). Lower it to "
            f"{server.ngram_max} or less."
        )
    if server.speculation in BY_MODEL:
        found += _model_faults(config, key)
    if rollout.routing != "own":
        found.append(
            f"{key} with rollout.routing {rollout.routing}: vLLM returns the experts of drafted tokens too, or drafts "
            "none (its second model runner). Set one of them to its default."
        )
    if any(str(name).replace("-", "_") == "async_scheduling" and value for name, value in server.vllm.items()):
        why = (
            "vLLM looks n-grams up in tokens that must be known before the next step"
            if server.speculation == "ngram"
            else "its drafts were compared with the policy without it only"
        )
        found.append(f"{key} and server.vllm sets async_scheduling: {why}. Remove one of them.")
    return found


def _model_faults(config: Config, key: str) -> list[str]:
    """Keys that a draft with weights of its own needs, or does not go with."""
    server, found = config.server, []
    if server.draft_model is None:
        found.append(f"{key} and server.draft_model is missing. Name the directory of the checkpoint that drafts.")
    if server.tensor_parallel > 1:
        found.append(
            f"{key} with server.tensor_parallel {server.tensor_parallel}: a draft split over workers was not compared "
            "with the policy. Set server.tensor_parallel to 1, with a replica per GPU, or server.speculation to ngram."
        )
    if server.weights == "w4a16":
        found.append(
            f"{key} with server.weights w4a16: vLLM loads a draft by the loader of the base, which packs weights to "
            "INT4. Set server.weights to fp8_per_channel or bf16, or server.speculation to ngram."
        )
    return found


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def wanted(server: ServerConfig) -> dict[str, Any] | None:
    """Speculation that the configuration asks for, as `Info` describes it; None without `server.speculation`."""
    if server.speculation == "none":
        return None
    found = {"method": server.speculation, "draft_tokens": server.draft_tokens}
    if server.speculation == "ngram":
        return found | {"ngram_min": server.ngram_min, "ngram_max": server.ngram_max, "model": None}
    model = str(draft_directory(server)) if server.speculation in BY_MODEL else None
    return found | {"ngram_min": 0, "ngram_max": 0, "model": model}


def called(drafts: Mapping[str, Any] | None) -> str:
    """Describe a server's speculation in words."""
    if drafts is None:
        return "no drafts"
    source = "from other completions" if drafts["method"] == "suffix" else f"by {drafts['model']}"
    if drafts["method"] == "ngram":
        source = f"{drafts['ngram_min']} to {drafts['ngram_max']} tokens looked up"
    return f"{drafts['method']} drafts of up to {drafts['draft_tokens']} tokens, {source}"
