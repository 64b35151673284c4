"""Promote the deployed format's GRPO checkpoint, or report which rule it misses; `python -m eval gate --run …`.

A rule passes if the data show it, not if they merely do not contradict it:
- `min_gain`: the lower end of the gain's 95 % interval is above it (so 0.0 means that a gain is shown).
- `max_quantization_loss`: the upper end of the interval of the format's loss against bf16 is at most this much, both
  for GRPO's accuracy and for the gain. This is a non-inferiority test with the limit as margin: with few problems the
  interval is wide and the verdict is "not shown", which more problems can change.
- `min_problems`: at least this many problems are behind these intervals.
- hygiene rates of GRPO in that format and in bf16, answers that could not be compared in any cell used, and the KL to
  the policy that `merge` measured: point values against their limits. A value that was not measured fails.
The held-out problems are read again and must share none with the run's training problems, neither with those that its
configuration names nor with those that its ledger lists; one that does revokes a promotion.
Only the gate writes `promoted` into a manifest: true on a pass, false again if a later gate does not pass.
"""

import dataclasses
import json
import shlex
import time
from collections.abc import Iterable, Sequence

from eval.artifacts import (
    POLICIES,
    Artifact,
    artifact,
    check_trained,
    eval_command,
    merge_missing,
    set_promotion,
)
from eval.compare import form_note
from eval.hygiene import findings, limits_of
from eval.options import add_configuration, command_parser
from eval.problems import check_disjoint, held_out, names_training, problems_hash
from eval.recheck import rechecked
from eval.result import measurement, read_result, run_config
from eval.rules import PASS, Rule, judge
from kit.core.config.schema import Config, DataConfig
from kit.core.errors import CHECK_FAILED, DONE, BadInput, CheckFailed
from kit.core.ledger import check_ledger, read_ledger
from kit.core.run_directory import RunDir, file_hash, read_manifest
from kit.data.problems import Problem

# Formats are checked column by column, and the batch size only affects speed.
NOT_COMPARED = ("formats", "batch_size")


def main(argv: list[str]) -> int:
    """Promote the artifact and return 0 if every rule passes, else return 1; `BadInput` if eval.json is stale."""
    epilog = "Limits of the run's configuration can be given as --eval.gate.key value."
    parser = command_parser("gate", __doc__, "folder that holds eval.json", epilog=epilog)
    add_configuration(parser)
    parser.add_argument("--dry_run", action="store_true", help="judge and print, but do not write the manifest")
    arguments, overrides = parser.parse_known_args(argv)
    run = RunDir.open(arguments.run, arguments.allow_own_code)
    config = run_config(run, overrides, arguments.config)
    file = (arguments.out or run.path) / "eval.json"
    result = read_result(file, run)
    checkpoint = gated_artifact(run, config.eval.gate.format)
    try:
        problems = check_problems(run, config, result, checkpoint)
    except CheckFailed:
        if checkpoint.manifest.get("promoted") and not arguments.dry_run:
            set_promotion(checkpoint, None)
        raise
    hashes = check_fresh(run, config, result, checkpoint)
    result = rechecked(file.parent, config, result, problems, hashes)
    rules = judge(config, result, checkpoint.manifest)
    passed = all(rule.verdict == PASS for rule in rules)
    print_rules(rules, checkpoint)
    if own := checkpoint.manifest.get("trained_for"):
        other = "" if own == checkpoint.manifest["format"] else f", not for {checkpoint.manifest['format']}"
        print(f"note: the training was quantization-aware, for {own}{other}")
    if note := base_note(config, result):
        print(note)
    changed = changed_limits(run, config)
    for key, (own, now) in changed.items():
        print(f"note: eval.gate.{key} is {own!r} in the run's configuration, and the gate was asked with {now!r}")
    if arguments.dry_run:
        return DONE if passed else CHECK_FAILED
    promotion = None
    if passed:
        date, rows = time.strftime("%Y-%m-%dT%H:%M:%S%z"), [vars(rule) for rule in rules]
        limits = {"limits": dataclasses.asdict(config.eval.gate), "changed_limits": changed}
        promotion = {"eval_hash": file_hash(file), "date": date, "rules": rows, **limits}
    if passed or checkpoint.manifest.get("promoted"):
        set_promotion(checkpoint, promotion)
    print(f"{'promoted' if passed else 'not promoted'}: {checkpoint.path}", flush=True)
    return DONE if passed else CHECK_FAILED


def changed_limits(run: RunDir, config: Config) -> dict[str, list]:
    """{key of eval.gate: [the run's own, what the gate was given]} of those that differ."""
    own, now = dataclasses.asdict(run_config(run, []).eval.gate), dataclasses.asdict(config.eval.gate)
    return {key: [own[key], now[key]] for key in own if own[key] != now[key]}


def gated_artifact(run: RunDir, name: str) -> Artifact:
    """Return the GRPO checkpoint in the gate's format, verified to be complete and of the run's base."""
    if name == "nf4":
        raise BadInput(
            "eval.gate.format is nf4, which is measured as NF4 base + adapter: there is no merged checkpoint to "
            "promote. Choose another of the formats that merge makes."
        )
    if not (run.merged / "grpo" / name).is_dir():
        make = merge_missing(run, [("grpo", name)])
        raise BadInput(f"{run.merged / 'grpo' / name} does not exist. Make it with: {make}")
    return artifact(run, "grpo", name)


def check_problems(run: RunDir, config: Config, result: dict, checkpoint: Artifact) -> list[Problem]:
    """Return the held-out problems, after checking by content that they were measured and that none was trained on.

    Trained on means: among the training problems of the configuration that the gate was given or of the run's own, or
    in its ledger. `CheckFailed` if one is, or if the ledger lists problems that the training data no longer has;
    `BadInput` if they are not the problems of eval.json, or if the ledger is not the one of the adapter.
    """
    from kit.data.problems import load_problems

    check_own_ledger(run, checkpoint)

    problems, trained = (
        held_out(config.data, config.eval.max_problems, reward=config.eval.reward),
        run_config(run, []),
    )
    own = trained.data
    consumed, training = consumed_ids(run), load_problems(own, "train") if names_training(own) else None
    if training is not None and own != config.data:
        check_disjoint(load_problems(config.data, "eval"), training)
    if seen := [problem for problem in problems if problem.id in consumed]:
        raise CheckFailed(
            f"{len(seen)} of {len(problems)} held-out problems were trained on: {run.ledger_file} lists "
            f"{seen[0].source}, {seen[0].question[:100]!r}. Point data.eval_path at other problems."
        )
    if training is not None and not trained.sft.is_given:  # demonstrations have ids of their own
        check_known(run, consumed, training)
    # An evaluation by an earlier version lacks newer keys; it behaved as their defaults do.
    data = dataclasses.asdict(DataConfig()) | (result.get("data") or {})
    expected = dataclasses.asdict(config.data)
    if other := [key for key, value in expected.items() if data.get(key) != value]:
        raise BadInput(
            f"eval.json was measured on other problems or prompts than the configuration names: data.{other[0]} was "
            f"{data.get(other[0])!r}, it is {expected[other[0]]!r}. {_again(run, result)}"
        )
    check_measurement(run, config, result)
    if (found := problems_hash(problems)) != result.get("problems_hash"):
        raise BadInput(
            f"eval.json is stale: its problems_hash is {result.get('problems_hash')}, that of the held-out problems "
            f"is now {found}. {_again(run, result)}"
        )
    return problems


def consumed_ids(run: RunDir) -> set[str]:
    """Ids in the run's ledger; empty without one."""
    return {one for entry in read_ledger(run.ledger_file) for one in entry.problem_ids}


def check_own_ledger(run: RunDir, checkpoint: Artifact) -> None:
    """Raise `BadInput` unless the ledger is the one that the checkpoint's adapter was written with."""
    version = checkpoint.manifest.get("adapter_version")
    if version is not None and (adapter := run.adapter_dir(version)).is_dir():
        check_ledger(run.ledger_file, read_manifest(adapter, "adapter"), adapter)


def check_known(run: RunDir, consumed: set[str], training: Sequence[Problem]) -> None:
    """Raise `CheckFailed` if the ledger lists problems that the training data no longer has: a held-out problem may
    have been among them."""
    if strangers := consumed - {problem.id for problem in training}:
        raise CheckFailed(
            f"{run.ledger_file} lists {len(strangers)} problems, such as {min(strangers)}, that the training data no "
            "longer has, so nothing shows whether held-out problems were among them. Restore the data of the training."
        )


def check_measurement(run: RunDir, config: Config, result: dict) -> None:
    """Raise `BadInput` unless the evaluation measured as the configuration says."""
    measured = {"stop": []} | (result.get("eval") or {})  # earlier versions had no stop texts
    expected = {key: value for key, value in measurement(config).items() if key not in NOT_COMPARED}
    options, wanted = result.get("reward_options", {}), config.reward.options
    if other := [key for key, value in expected.items() if measured.get(key) != value]:
        keys = {name: "rollout.stop" if name == "stop" else f"eval.{name}" for name in other}
        key, was, now = keys[other[0]], measured.get(other[0]), expected[other[0]]
        known = {keys[name]: measured[name] for name in other if name in measured}
        flags = {name: value if isinstance(value, str) else json.dumps(value) for name, value in known.items()}
        flags = flags if len(flags) == len(other) else {}
    elif options != config.reward.options:
        key, was, now, flags = "reward.options", options, wanted, {"reward.options": json.dumps(options)}
    else:
        return
    instead = " ".join(f"--{name} {shlex.quote(value)}" for name, value in flags.items())
    raise BadInput(
        f"eval.json was measured with other settings than the configuration has: {key} was {was!r}, it is {now!r}. "
        f"{_again(run, result)}{f', or gate what was measured with {instead}' if instead else ''}"
    )


def check_fresh(run: RunDir, config: Config, result: dict, checkpoint: Artifact) -> dict[tuple[str, str], str]:
    """The artifact hashes of the cells that the gate reads: base and GRPO in format and bf16. `BadInput` unless the
    evaluation measured exactly these checkpoints."""
    hashes = {}
    name, manifest = config.eval.gate.format, checkpoint.manifest
    formats = list(dict.fromkeys((name, "bf16")))
    absent = [f"{policy} in {used}" for used in formats for policy in POLICIES if used not in result["matrix"][policy]]
    if absent:
        raise BadInput(
            f"eval.json has no {', '.join(absent)}: the gate compares base with GRPO in {name}, and {name} with bf16. "
            f"{_again(run, result, formats)}"
        )
    for key in ("base_hash", "adapter_hash"):
        if result.get(key) != manifest.get(key):
            raise BadInput(
                f"eval.json is stale: its {key} is {result.get(key)}, that of {checkpoint.path} is "
                f"{manifest.get(key)}. {_again(run, result)}"
            )
    for policy in POLICIES:
        for used in formats:
            if not (place := run.merged / policy / used).is_dir():
                make = merge_missing(run, [(policy, used)])
                raise BadInput(f"{place} no longer exists. Merge it with: {make}")
            now = checkpoint if (policy, used) == ("grpo", name) else artifact(run, policy, used)
            check_trained(run, manifest.get("adapter_version"), {(policy, used): now})
            if (old := result["matrix"][policy][used].get("artifact_hash")) != now.hash:
                raise BadInput(
                    f"eval.json is stale: its artifact_hash of {policy} in {used} is {old}, that of {now.path} is now "
                    f"{now.hash}. {_again(run, result)}"
                )
            hashes[policy, used] = now.hash
    return hashes


def _again(run: RunDir, result: dict, formats: Iterable[str] = ()) -> str:
    """The command that measures what `result` did, plus `formats`."""
    return f"Evaluate again: {eval_command(run, list(dict.fromkeys([*result['matrix']['grpo'], *formats])))}"


def base_note(config: Config, result: dict) -> str | None:
    """A note on how much of a gain is where the base was truncated or unparseable; None if the base is in range."""
    name = config.eval.gate.format
    if (form := result["gain"][name].get("base_form")) is None:
        return None
    note = form_note(findings(result["matrix"]["base"][name], limits_of(config)), {"base_form": form})
    return note and f"note: the {name} base {note}"


def print_rules(rules: list[Rule], checkpoint: Artifact) -> None:
    """Print the table of rule, limit, measured value and verdict as plain lines that survive a pipe."""
    widths = [max(len(getattr(rule, part)) for rule in rules) for part in ("name", "limit", "measured")]
    manifest = checkpoint.manifest
    print(f"gate {checkpoint.path}: {manifest['policy']} v{manifest.get('adapter_version')} in {manifest['format']}")
    for rule in rules:
        parts = zip((rule.name, rule.limit, rule.measured), widths, strict=True)
        print("  ".join(part.ljust(width) for part, width in parts) + f"  {rule.verdict}")
