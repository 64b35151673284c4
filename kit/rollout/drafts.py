"""Metrics of `server.speculation`, computed from the replicas' counters."""

from kit.rollout.protocol import Drafted

KEYS = ("draft_acceptance", "tokens_per_forward")


def figures(before: dict[str, Drafted | None], after: dict[str, Drafted | None]) -> dict[str, float | None]:
    """`KEYS` of what the replicas did between two counts by URL: accepted of the drafted tokens, and generated
    tokens per forward pass of a sequence, 1 without drafts. None: nothing to count. vLLM counts drafts that it accepts
    behind the end of a completion too: with short completions the second figure is too high."""
    drafted = accepted = generated = 0
    for url, now in after.items():
        if now is None:
            continue
        then = before.get(url)
        if then is None or now["generated"] < then["generated"]:  # a replica that was started again counts from 0
            then = Drafted(drafted=0, accepted=0, generated=0)
        drafted += now["drafted"] - then["drafted"]
        accepted += now["accepted"] - then["accepted"]
        generated += now["generated"] - then["generated"]
    passes = generated - accepted
    found = accepted / drafted if drafted else None, generated / passes if passes > 0 else None
    return dict(zip(KEYS, found, strict=True))
