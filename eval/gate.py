"""Promote the deployed format's GRPO checkpoint, or say which rule it misses; `python -m eval gate --run …`.

A rule passes when the data show it, not when they merely do not contradict it:
- `min_gain`: the lower end of the gain's 95 % interval lies above it (0.0 therefore means: a gain is shown).
- `max_quantization_loss`: the upper end of the interval of what the format loses against bf16 is at most this much,
  for GRPO's accuracy and for the gain alike. This is a non-inferiority test with the limit as margin: with few
  problems the interval is wide and the verdict is "not shown", which more problems can change.
- hygiene rates of GRPO in that format, answers that could not be compared, and the KL to the policy that `merge`
  measured: point values against their limits. A value that was not measured fails.
Only the gate writes `promoted` into a manifest: true on a pass, false again when a later gate does not pass.
"""

import argparse
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

from eval.artifacts import POLICIES, Artifact, artifact, merge_command, set_promotion
from eval.problems import held_out, problems_hash
from eval.report import read_result
from eval.run import measurement, run_config
from recipes.parts.config import Config
from recipes.parts.errors import CHECK_FAILED, DONE, BadInput
from recipes.parts.rundir import RunDir, file_hash

PASS, FAIL, NOT_SHOWN = "pass", "FAIL", "NOT SHOWN"
# Columns are looked for one by one, and how many prompts share a batch is a matter of speed.
NOT_COMPARED = ("formats", "batch_size")


@dataclass(frozen=True)
class Rule:
    """One rule as the table shows it."""

    name: str
    limit: str
    measured: str
    verdict: str


def main(argv: list[str]) -> int:
    """0 and a promoted artifact when every rule passes, 1 when one does not; `BadInput` when eval.json is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m eval gate",
        description=__doc__,
        epilog="Thresholds of the run's configuration can be given as --eval.gate.key value.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--run", required=True, help="run directory, e.g. runs/tiny")
    parser.add_argument("--out", type=Path, help="folder that holds eval.json; default: the run directory")
    parser.add_argument("--config", help="YAML to take instead of the run's own configuration")
    parser.add_argument("--dry_run", action="store_true", help="judge and print, leave the manifest as it is")
    arguments, overrides = parser.parse_known_args(argv)
    run = RunDir.open(arguments.run)
    config = run_config(run, overrides, arguments.config)
    file = (arguments.out or run.path) / "eval.json"
    result = read_result(file, run)
    checkpoint = gated_artifact(run, config.eval.gate.format)
    check_fresh(run, config, result, checkpoint)
    rules = judge(config, result, checkpoint.manifest)
    passed = all(rule.verdict == PASS for rule in rules)
    print_rules(rules, checkpoint)
    if arguments.dry_run:
        return DONE if passed else CHECK_FAILED
    promotion = None
    if passed:
        promotion = {"eval_hash": file_hash(file), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        promotion["rules"] = [vars(rule) for rule in rules]
    if passed or checkpoint.manifest.get("promoted"):
        set_promotion(checkpoint, promotion)
    print(f"{'promoted' if passed else 'not promoted'}: {checkpoint.path}", flush=True)
    return DONE if passed else CHECK_FAILED


def gated_artifact(run: RunDir, name: str) -> Artifact:
    """The GRPO checkpoint in the gate's format, whole and of the run's base."""
    if name == "nf4":
        raise BadInput(
            "eval.gate.format is nf4, which is measured as NF4 base + adapter: there is no merged checkpoint to "
            "promote. Choose bf16, fp8 or w4a16."
        )
    if not (run.merged / "grpo" / name).is_dir():
        raise BadInput(f"{run.merged / 'grpo' / name} does not exist. Make it with: {merge_command(run, [name])}")
    return artifact(run, "grpo", name)


def check_fresh(run: RunDir, config: Config, result: dict, checkpoint: Artifact) -> None:
    """`BadInput` unless the evaluation measured these very checkpoints as the configuration says, on its problems.

    The checkpoints are those of base and GRPO in the gate's format and in bf16.
    """
    again = f"Evaluate again: python -m eval --run {run.path}"
    name, manifest = config.eval.gate.format, checkpoint.manifest
    measured, expected = result.get("data") or {}, dataclasses.asdict(config.data)
    if other := [key for key, value in expected.items() if measured.get(key) != value]:
        raise BadInput(
            f"eval.json was measured on other problems or prompts than the configuration names: data.{other[0]} was "
            f"{measured.get(other[0])!r}, it is {expected[other[0]]!r}. {again}"
        )
    measured = result.get("eval") or {}
    expected = {key: value for key, value in measurement(config).items() if key not in NOT_COMPARED}
    if other := [key for key, value in expected.items() if measured.get(key) != value]:
        raise BadInput(
            f"eval.json was measured in another way than the configuration names: eval.{other[0]} was "
            f"{measured.get(other[0])!r}, it is {expected[other[0]]!r}. {again}"
        )
    if (found := problems_hash(held_out(config.data, config.eval.max_problems))) != result.get("problems_hash"):
        raise BadInput(
            f"eval.json is stale: its problems_hash is {result.get('problems_hash')}, that of the held-out problems "
            f"is now {found}. {again}"
        )
    formats = list(dict.fromkeys((name, "bf16")))
    for policy in POLICIES:
        cells = result["matrix"].get(policy, {})
        if absent := [needed for needed in formats if needed not in cells]:
            raise BadInput(f"eval.json has no {', '.join(absent)} cell of {policy}, which the gate compares. {again}")
    for key in ("base_hash", "adapter_hash"):
        if result.get(key) != manifest.get(key):
            raise BadInput(
                f"eval.json is stale: its {key} is {result.get(key)}, that of {checkpoint.path} is "
                f"{manifest.get(key)}. {again}"
            )
    for policy in POLICIES:
        for used in formats:
            now = checkpoint if (policy, used) == ("grpo", name) else artifact(run, policy, used)
            if (old := result["matrix"][policy][used].get("artifact_hash")) != now.hash:
                raise BadInput(
                    f"eval.json is stale: its artifact_hash of {policy} in {used} is {old}, that of {now.path} is now "
                    f"{now.hash}. {again}"
                )


def judge(config: Config, result: dict, manifest: dict) -> list[Rule]:
    """Every rule of the gate with its limit, what was measured, and the verdict."""
    gate = config.eval.gate
    cell, gain = result["matrix"]["grpo"][gate.format], result["gain"][gate.format]
    rules = [_above(f"gain in {gate.format}", gate.min_gain, gain)]
    if gate.format != "bf16":
        lost_gain = _negated(result["gain_survival"][gate.format])
        loss = result["quantization_loss"][gate.format]
        rules.append(_at_most("accuracy lost against bf16", gate.max_quantization_loss, loss))
        rules.append(_at_most("gain lost against bf16", gate.max_quantization_loss, lost_gain))
    kl = (manifest.get("verify") or {}).get("mean_kl")
    return [
        *rules,
        _rate("parse rate", cell["parse_rate"], at_least=gate.min_parse_rate),
        _rate("prompt leak", cell["prompt_leak_rate"], at_most=gate.max_prompt_leak),
        _rate("ended by the stop token", cell["end_of_turn_rate"], at_least=gate.min_end_of_turn_rate),
        _rate("answers undecided", cell["undecided"] / cell["n"], at_most=config.reward.max_unknown_fraction),
        _rate("KL(policy || artifact), nats", kl, at_most=gate.max_policy_kl),
    ]


def _above(name: str, limit: float, found: dict) -> Rule:
    """`found["difference"]` is shown to be above `limit`: the lower end of its interval is."""
    low = found["interval"][0]
    verdict = PASS if low > limit else NOT_SHOWN if found["difference"] > limit else FAIL
    shown = _more_problems(found, found["difference"] - limit, found["difference"] - low, verdict)
    return Rule(name, f"> {limit:g}, lower end", shown, verdict)


def _at_most(name: str, limit: float, found: dict) -> Rule:
    """`found["difference"]` is shown to be at most `limit`: the upper end of its interval is."""
    high = found["interval"][1]
    verdict = PASS if high <= limit else NOT_SHOWN if found["difference"] <= limit else FAIL
    shown = _more_problems(found, limit - found["difference"], high - found["difference"], verdict)
    return Rule(name, f"<= {limit:g}, upper end", shown, verdict)


def _rate(name: str, value: float | None, at_least: float | None = None, at_most: float | None = None) -> Rule:
    limit = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
    if value is None:
        return Rule(name, limit, "not measured (merged with --skip_verify)", FAIL)
    holds = value >= at_least if at_least is not None else value <= at_most
    return Rule(name, limit, f"{value:.4g}", PASS if holds else FAIL)


def _more_problems(found: dict, room: float, half_width: float, verdict: str) -> str:
    """The estimate and interval; when the interval alone is in the way, how many problems would narrow it enough."""
    low, high = found["interval"]
    shown = f"{found['difference']:+.4f} [{low:+.4f}, {high:+.4f}]"
    if verdict == NOT_SHOWN and room > 0:  # the width of an interval falls with the square root of the problems
        shown += f"; about {math.ceil(found['n'] * (half_width / room) ** 2)} problems instead of {found['n']} decide"
    return shown


def _negated(difference: dict) -> dict:
    low, high = difference["interval"]
    return {**difference, "difference": 0.0 - difference["difference"], "interval": [0.0 - high, 0.0 - low]}


def print_rules(rules: list[Rule], checkpoint: Artifact) -> None:
    """The table of rule, limit, measured, verdict, as plain lines that survive a pipe."""
    widths = [max(len(getattr(rule, part)) for rule in rules) for part in ("name", "limit", "measured")]
    manifest = checkpoint.manifest
    print(f"gate {checkpoint.path}: {manifest['policy']} v{manifest.get('adapter_version')} in {manifest['format']}")
    for rule in rules:
        parts = zip((rule.name, rule.limit, rule.measured), widths, strict=True)
        print("  ".join(part.ljust(width) for part, width in parts) + f"  {rule.verdict}")
