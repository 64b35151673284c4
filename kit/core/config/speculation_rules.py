"""Settings that conflict with `server.speculation`, speculative decoding on the rollout servers. Imports no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from kit.core.config.schema import Config, ServerConfig

# Kinds of layers in `layer_types` that keep keys and values per token: a rejected draft leaves nothing behind.
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def faults(config: Config) -> list[str]:
    """Errors about `server.speculation`; empty if it is valid or none."""
    server, rollout = config.server, config.rollout
    found: list[str] = []
    if server.speculation == "none":
        return found
    key = f"server.speculation is {server.speculation}"
    if rollout.backend != "server":
        found.append(
            f"{key} with rollout.backend {rollout.backend}: only servers draft tokens. Set it to none, or "
            "rollout.backend to server."
        )
    if server.ngram_min > server.ngram_max:
        found.append(
            f"server.ngram_min ({server.ngram_min}) is above server.ngram_max ({server.ngram_max}). Lower it to "
            f"{server.ngram_max} or less."
        )
    if rollout.routing != "own":
        found.append(
            f"{key} with rollout.routing {rollout.routing}: vLLM returns the experts of drafted tokens too, or drafts "
            "none (its second model runner). Set one of them to its default."
        )
    if any(str(name).replace("-", "_") == "async_scheduling" and value for name, value in server.vllm.items()):
        found.append(
            f"{key} and server.vllm sets async_scheduling: vLLM looks n-grams up in tokens that must be known before "
            "the next step. Remove one of them."
        )
    return found


def recurrent_layers(layer_types: Iterable[str]) -> list[str]:
    """Kinds of layers whose state vLLM does not take back when a draft is rejected: a step without drafts reads a
    stale one (vllm#52942)."""
    return sorted({*layer_types} - ATTENTION)


def wanted(server: ServerConfig) -> dict[str, Any] | None:
    """Speculation that the configuration asks for, as `Info` describes it; None without `server.speculation`."""
    if server.speculation == "none":
        return None
    keys = {key: getattr(server, key) for key in ("draft_tokens", "ngram_min", "ngram_max")}
    return {"method": server.speculation, **keys}


def called(drafts: Mapping[str, Any] | None) -> str:
    """Describe a server's speculation in words."""
    if drafts is None:
        return "no drafts"
    looked_up = f"{drafts['ngram_min']} to {drafts['ngram_max']} tokens looked up"
    return f"{drafts['method']} drafts of up to {drafts['draft_tokens']} tokens, {looked_up}"
