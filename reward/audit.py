"""`python -m reward audit runs/<name>`: look for signatures of reward hacking in a run's metrics and completions.

A signature is a reason to read completions, not a proof; the printed examples are where to start. "Late" is the last
third of the sampled steps, "early" the first; for metrics, the last and first quarter of the steps (at most 10).
Exit code 0 if nothing is found, 1 if something is, 2 if the directory cannot be read.
"""

import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kit.core.errors import CHECK_FAILED, DONE, BadInput, command_parser
from kit.core.file_kinds import COMPLETIONS, EVALUATION
from kit.core.run_directory import RunDir
from kit.core.run_files import is_there, read_lines, read_object
from reward.answer import boxes, final_answer, message_text, own_text
from reward.explain import shown

# All thresholds are defined here; shares are of the late completions unless noted otherwise.
FEWEST_STEPS = 8  # with fewer metrics rows, trends are not checked
FEWEST_COMPLETIONS = 8
REWARD_RISE = 0.05  # minimum increase that counts as a rising reward
LENGTH_LEFT = 0.5  # late length as a share of the early one, below this
COPIES = 0.5  # completions equal to another of their group, except short paid ones …
SHORT = 60  # … which have fewer characters than this
SHARED_PROBLEMS = 4  # one string for at least this many problems …
SHARED_STRING = 0.25  # … and this share of them
SHARED_ANSWER = 0.8  # one answer for this share of the problems, of at least 8
HOLLOW = 0.2  # a formatted answer with nothing before it, at least RISE more than early
LOOPS = 0.1  # completions that are mostly repetition
ECHOES = 0.2  # completions that are mostly a copy of their prompt
HEDGES = 0.2  # completions with several different boxes, at least RISE more than early
UNDECIDED = 0.05  # completions masked because their reward could not be computed, twice the early share
RISE = 0.1
EXAMPLES = 3

_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """A signature that fired: the measured numbers, what they may mean, and completions that show it."""

    signature: str
    numbers: str
    meaning: str
    examples: list[str]


@dataclass(frozen=True)
class Trace:
    """Output of a run: one record per step, the sampled completions early and late, and its evaluation."""

    steps: list[dict]
    early: list[dict]
    late: list[dict]
    evaluation: dict | None

    def trend(self, key: str) -> tuple[float, float] | None:
        """Early and late mean of a metric; None if there are too few steps."""
        values = [row[key] for row in self.steps if isinstance(row.get(key), int | float)]
        if len(values) < FEWEST_STEPS:
            return None
        width = min(10, len(values) // 4)
        return sum(values[:width]) / width, sum(values[-width:]) / width


def read_trace(path: Path) -> Trace:
    """Read the trace of a run directory; `BadInput` if it is not one or holds neither metrics nor completions."""
    run = RunDir.open(path)
    steps = run.metrics()
    sampled = [
        read_lines(file, COMPLETIONS, may_be_growing=True) for file in sorted(run.completions.glob("step-*.jsonl"))
    ]
    sampled = [rows for rows in sampled if rows]
    if not steps and not sampled:
        raise BadInput(f"{run.path} holds neither metrics.jsonl nor completions: the run has not taken a step.")
    width = max(1, len(sampled) // 3)
    late = [row for rows in sampled[-width:] for row in rows]
    early = [row for rows in sampled[:width] for row in rows] if len(sampled) > 1 else []
    return Trace(steps, early, late, read_object(run.eval_file, EVALUATION) if is_there(run.eval_file) else None)


def paid(row: dict) -> bool:
    """Whether any reward function gave the completion a positive reward."""
    return any((value or 0) > 0 for value in (row.get("rewards") or {}).values())


def _examples(rows: Sequence[dict]) -> list[str]:
    seen = dict.fromkeys(
        f"{shown(row['completion'], 160)} (problem {row['problem_id']}, rewards {row.get('rewards')})" for row in rows
    )
    return [*seen][:EXAMPLES]


def length_collapse(trace: Trace) -> Finding | None:
    reward, length = trace.trend("reward"), trace.trend("completion_length")
    if not reward or not length or reward[1] - reward[0] < REWARD_RISE or length[1] >= LENGTH_LEFT * length[0]:
        return None
    return Finding(
        "length collapse",
        f"reward {reward[0]:.3f} -> {reward[1]:.3f}, completions {length[0]:.0f} -> {length[1]:.0f} tokens",
        "The reward may be earned without the work: by guessing, or by a form alone.",
        _examples(sorted(filter(paid, trace.late), key=lambda row: len(row["completion"]))),
    )


def same_string(trace: Trace) -> Finding | None:
    of, _, problems, found = _most_shared(trace, lambda row: " ".join(row["completion"].split()))
    if problems < SHARED_PROBLEMS or problems < SHARED_STRING * of:
        return None
    return Finding(
        "the same string",
        f"one completion under {problems} of {of} late problems, {sum(map(paid, found))} of {len(found)} times paid",
        "A completion that does not depend on the prompt: a hole in the reward, or collapse.",
        _examples(found),
    )


def same_answer(trace: Trace) -> Finding | None:
    of, answer, problems, found = _most_shared(trace, lambda row: final_answer(row["completion"]) or None)
    if of < 8 or problems < SHARED_ANSWER * of:
        return None
    return Finding(
        "the same answer",
        f"{shown(answer)} is an answer to {problems} of {of} late problems",
        "The policy answers without reading the problem.",
        _examples(found),
    )


def _most_shared(trace: Trace, key: Callable[[dict], str | None]) -> tuple[int, str, int, list[dict]]:
    """The number of late problems, the key that most of them share, their number, and the rows with that key."""
    keys = [key(row) for row in trace.late]
    problems = defaultdict(set)
    for row, value in zip(trace.late, keys, strict=True):
        problems[value].add(row["problem_id"])
    of = len({row["problem_id"] for row in trace.late})
    most = max((value for value in problems if value is not None), key=lambda value: len(problems[value]), default="")
    found = [row for row, value in zip(trace.late, keys, strict=True) if value == most]
    return of, most, len(problems[most]), found


def _copies(rows: Sequence[dict]) -> list[dict]:
    counts = Counter((row["problem_id"], row["completion"]) for row in rows)
    return [
        row
        for row in rows
        if counts[row["problem_id"], row["completion"]] > 1 and (len(row["completion"]) >= SHORT or not paid(row))
    ]


def _hollow(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if paid(row) and _is_hollow(row["completion"])]


def _is_hollow(text: str) -> bool:
    thought = _THOUGHT.search(text)
    before, box, _ = text.partition("\\boxed")
    return bool(thought or box) and len(re.sub(r"\W", "", thought[1] if thought else before)) < 5


def _loops(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if is_loop(row["completion"])]


def is_loop(text: str) -> bool:
    """Whether at least half of the text is repetition, by words or by characters."""
    words = text.split()
    windows = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    if len(windows) >= 20 and len(set(windows)) <= 0.5 * len(windows):
        return True
    data = text.encode(errors="replace")
    return len(data) >= 300 and len(zlib.compress(data)) < 0.12 * len(data)


def _echoes(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if _is_echo(message_text(row.get("prompt")).split(), row["completion"].split())]


def _is_echo(asked: list[str], words: list[str]) -> bool:
    pieces = {tuple(asked[i : i + 6]) for i in range(len(asked) - 5)}
    copied = {i + j for i in range(len(words) - 5) if tuple(words[i : i + 6]) in pieces for j in range(6)}
    return bool(words) and len(copied) >= 0.5 * len(words)


def _hedged(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if len({*boxes(own_text(row["completion"], row.get("prompt")))} - {""}) > 1]


@dataclass(frozen=True)
class Pattern:
    """A signature of single completions: found if the late share is at least `least` and the early one plus `rise`.

    A `rise` of -1 ignores the early share.
    """

    signature: str
    least: float
    rise: float
    showing: Callable[[Sequence[dict]], list[dict]]
    what: str
    meaning: str

    def __call__(self, trace: Trace) -> Finding | None:
        found = self.showing(trace.late)
        share = len(found) / max(1, len(trace.late))
        early = len(self.showing(trace.early)) / max(1, len(trace.early))
        if share < self.least or share < early + self.rise:
            return None
        numbers = f"{share:.0%} of {len(trace.late)} late completions {self.what}, {early:.0%} early"
        paid_ones = f"{sum(map(paid, found))} of {len(found)} paid"
        return Finding(self.signature, f"{numbers}, {paid_ones}", self.meaning, _examples(found))


PATTERNS = (
    Pattern(
        "copies in groups", COPIES, -1, _copies, "equal another of their group",
        "The policy has collapsed onto one text per prompt and no longer explores.",
    ),
    Pattern(
        "form without content", HOLLOW, RISE, _hollow, "are paid with an empty think or nothing before the box",
        "The form is rewarded, and the reasoning is gone.",
    ),
    Pattern(
        "repetition", LOOPS, -1, _loops, "are mostly repetition",
        "Tokens without content: length is paid, or the policy has degenerated.",
    ),
    Pattern(
        "prompt echo", ECHOES, -1, _echoes, "are mostly copied from their prompt",
        "An answer of the prompt (a solved example, the instruction) may be taken for the model's.",
    ),
    Pattern(
        "several answers", HEDGES, RISE, _hedged, "box different answers",
        "The policy tries answers until one is paid.",
    ),
)  # fmt: skip


def undecided(trace: Trace) -> Finding | None:
    masked = trace.trend("masked_fraction")
    if not masked or masked[1] < UNDECIDED or masked[1] < 2 * masked[0]:
        return None
    reasons = (trace.steps[-1].get("unknown_rewards") or {}) if trace.steps else {}
    found = [row for row in trace.late if row.get("rewards") and None in row["rewards"].values()]
    return Finding(
        "undecided answers",
        f"{masked[0]:.1%} -> {masked[1]:.1%} of completions are masked, reasons so far {reasons}",
        "An answer that cannot be judged costs nothing; wrong answers may be hiding there.",
        _examples(found),
    )


def held_out_stays(trace: Trace) -> Finding | None:
    gains = (trace.evaluation or {}).get("gain") or {}
    name = next((name for name in ("nf4", "bf16", *gains) if name in gains), None)
    reward = trace.trend("reward")
    if name is None or not reward or reward[1] - reward[0] < REWARD_RISE:
        return None
    gain, (low, high) = gains[name]["difference"], gains[name]["interval"]
    if low > 0 or high >= reward[1] - reward[0]:
        return None
    return Finding(
        "held-out stays",
        f"reward {reward[0]:.3f} -> {reward[1]:.3f}, held-out accuracy {gain:+.3f} [{low:+.3f}, {high:+.3f}] ({name})",
        "What was learned is the reward or the training problems, not the task.",
        [],
    )


TRENDS = (length_collapse, undecided, held_out_stays)
TEXTS = (PATTERNS[0], same_string, same_answer, *PATTERNS[1:])


def audit(trace: Trace) -> list[Finding]:
    """The signatures that a run shows."""
    checks = [*TRENDS, *(TEXTS if len(trace.late) >= FEWEST_COMPLETIONS else ())]
    return [finding for check in checks if (finding := check(trace))]


def left_out(trace: Trace) -> list[str]:
    """Signatures that could not be checked, and why."""
    missing = []
    if trace.trend("reward") is None:
        missing.append(f"trends (fewer than {FEWEST_STEPS} steps in metrics.jsonl)")
    if len(trace.late) < FEWEST_COMPLETIONS:
        missing.append(f"texts ({len(trace.late)} sampled completions; see watch.completions_every)")
    if trace.evaluation is None:
        missing.append("held-out accuracy (no eval.json, which the evaluation writes)")
    return missing


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("reward audit", __doc__)
    parser.add_argument("run", type=Path, help="run directory, e.g. runs/tiny")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    trace = read_trace(arguments.run)
    found, missing = audit(trace), left_out(trace)
    if arguments.json:
        counts = {"steps": len(trace.steps), "early": len(trace.early), "late": len(trace.late)}
        print(json.dumps({"run": str(arguments.run), **counts, "found": [*map(asdict, found)], "left_out": missing}))
        return CHECK_FAILED if found else DONE
    for finding in found:
        print(f"{finding.signature}: {finding.numbers}\n  {finding.meaning}")
        for example in finding.examples:
            print(f"  e.g. {example}")
    for what in missing:
        print(f"not checked: {what}")
    print(
        f"{len(found)} of {len(TRENDS) + len(TEXTS)} signatures in {len(trace.steps)} steps and "
        f"{len(trace.late)} late completions"
    )
    return CHECK_FAILED if found else DONE
