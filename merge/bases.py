"""Choose the base to merge into: merge the policy into both and compare each with the policy as trained."""

import argparse
import time
from dataclasses import asdict

from kit.core.errors import DONE, BadInput
from kit.core.run_directory import INTO, read_manifest, write_record
from merge.card import write_card
from merge.command import POLICIES, Merge
from merge.tables import show_table

RESULT = "compare_bases.json"


def check_options(arguments: argparse.Namespace) -> None:
    """Raise `BadInput` for options that have no meaning with --compare_bases; without --run, --out names an import."""
    given = {"--out": arguments.out if arguments.run is not None else None, "--skip_verify": arguments.skip_verify}
    given |= {"--force": arguments.force, "--into original": arguments.into != INTO[0]}
    given |= {"--policy": arguments.policy != list(POLICIES), "--push_to_hub": arguments.push_to_hub}
    if wrong := [name for name, value in given.items() if value]:
        raise BadInput(
            f"--compare_bases merges bf16 of the policy into both bases and scores both: {', '.join(wrong)} cannot be "
            "given with it. Merge what it recommends with a second command."
        )


def compare_bases(arguments: argparse.Namespace, command: list[str]) -> int:
    """Merge the policy into both bases in BF16, or reuse existing merges; print which is closer and write RESULT.

    A base that is closer on the run's own sequences is closer to what was trained; only an evaluation shows which one
    solves more problems.
    """
    options = vars(arguments) | {"format": ["bf16"], "policy": ["grpo"]}
    merges = {into: Merge(argparse.Namespace(**options | {"into": into}), reuse=True) for into in INTO}
    for merge in merges.values():
        doing = "is there already" if merge.reuses_bf16("grpo") else "to be written"
        print(f"grpo bf16: {merge.place('grpo', 'bf16')}, {doing}", flush=True)
    if arguments.dry_run:
        return DONE
    result = measure(merges)
    write_record(arguments.run / RESULT, result | {"command": ["python", "-m", "merge", *command]})
    print_comparison(result)
    print(f"written: {arguments.run / RESULT}")
    return DONE


def measure(merges: dict[str, Merge]) -> dict:
    """Return the content of RESULT, writing missing checkpoints."""
    first = next(iter(merges.values()))
    verifier, bases = first.verifier(), {}
    for into, merge in merges.items():
        merge.share_verifier(verifier)
        place = merge.place("grpo", "bf16")
        if merge.reuses_bf16("grpo"):
            manifest = read_manifest(place, "checkpoint", deep=True)
            found = asdict(verifier.compare("grpo", place, plain=True))
        else:
            manifest = merge.write("grpo", "bf16")
            found = manifest["verify"]
            write_card(merge.run, place)
        bases[into] = {"path": str(place), "retained_update": manifest["retained_update"], **found}
    facts = first.facts("grpo")
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **{key: facts[key] for key in ("base_hash", "adapter_version", "adapter_hash")},
        "base_kl": verifier.update_kl(plain=True),
        "bases": bases,
        "closer": min(bases, key=lambda into: bases[into]["mean_kl"]),
    }


def print_comparison(result: dict) -> None:
    """Print the table and the sentence that end the command."""
    rows = []
    for into, found in result["bases"].items():
        kept = found["retained_update"]
        numbers = f"{found['mean_kl']:.2e}", f"{found['max_abs_dlogp']:.3f}", f"{found['top1_agreement']:.3f}"
        rows.append((into, "no update" if kept is None else f"{kept:.4f}", *numbers, found["path"]))
    show_table(("merged into", "update kept", "KL(policy‖it)", "max |Δlogp|", "top-1", "path"), rows)
    bases, closer = result["bases"], result["closer"]
    other = next(into for into in bases if into != closer)
    tokens = bases[closer]["tokens"]
    print(
        f"closer to the trained policy: {closer} (mean KL {bases[closer]['mean_kl']:.2e} against "
        f"{bases[other]['mean_kl']:.2e} of {other}, on {tokens} tokens; the policy without its adapter is "
        f"{result['base_kl']:.2e} away)"
    )
