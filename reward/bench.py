"""Print how fast the math reward scores: `python -m reward.bench [--workers 2] [--towers]`.

1,024 completions of about 4,000 characters per line: seconds for the batch, completions per second, and the median
and 99th percentile time of a single completion scored alone. `--towers` adds 5 % of answers that cannot be computed;
each costs its full time limit, spread over the workers.
"""

import argparse
import time
from collections.abc import Callable

from kit.core.config.schema import RewardConfig
from reward import reward_functions
from reward.pool import shared_pool

COMPLETIONS, ALONE, TIMEOUT_S = 1024, 128, 2.0
REASONING = "The next line of reasoning follows, 12 + 30 = 42, and the work goes on. " * 56  # about 4,000 characters
PROMPT = [{"role": "user", "content": "What is it?\nPut the final answer in \\boxed{}."}]


def cases(towers: bool) -> dict[str, list[tuple[str, str]]]:
    """(answer, gold) pairs by name, all distinct within a case, because equal pairs of a batch are compared once."""
    numbers = range(2, COMPLETIONS + 2)
    found = {
        "plain numbers": [(str(n), str(n)) for n in numbers],
        "roots": [(rf"\sqrt{{{n}}}+1", rf"1+\sqrt{{{n}}}") for n in numbers],
        "polynomials": [(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n}") for n in numbers],
        "polynomials, wrong": [(f"(x+{n})^2", f"x^2+{2 * n}x-{n * n}") for n in numbers],
        "intervals and sets": [
            (rf"(-\infty,{n}]\cup[{n + 1},\infty)", rf"x\le {n} \text{{ or }} x\ge {n + 1}") for n in numbers
        ],
        "left to math-verify": [(rf"\sqrt{{{n * n + 2}+{2 * n}\sqrt{{2}}}}", rf"{n}+\sqrt{{2}}") for n in numbers],
    }
    if towers:
        found["plain numbers, 5 % towers"] = [
            (f"{n}^{{10^{{10}}}}" if n % 20 == 0 else str(n), str(n)) for n in numbers
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reward.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--towers", action="store_true", help="add answers that cannot be computed (a minute)")
    arguments = parser.parse_args()
    config = RewardConfig(workers=arguments.workers, timeout_s=TIMEOUT_S, max_unknown_fraction=1.0)
    (reward,), _ = reward_functions(config)
    started = time.perf_counter()
    shared_pool(arguments.workers, TIMEOUT_S).compare([(r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}")])
    print(f"start of the workers, once per process: {time.perf_counter() - started:.2f} s", flush=True)
    for name, pairs in cases(arguments.towers).items():
        completions = [f"{REASONING}\\boxed{{{answer}}}" for answer, _ in pairs]
        golds = [gold for _, gold in pairs]
        started = time.perf_counter()
        rewards = reward(prompts=[PROMPT] * COMPLETIONS, completions=completions, gold=golds)
        seconds = time.perf_counter() - started
        line = f"{name}: {seconds:.2f} s, {COMPLETIONS / seconds:,.0f}/s, {rewards.count(None)} undecided"
        if rewards.count(None) == 0:
            alone = sorted(_alone(reward, *one) for one in zip(completions[-ALONE:], golds[-ALONE:], strict=True))
            line += f"; alone p50 {alone[ALONE // 2] * 1e3:.2f} ms, p99 {alone[-2] * 1e3:.2f} ms"
        print(line, flush=True)


def _alone(reward: Callable, completion: str, gold: str) -> float:
    started = time.perf_counter()
    reward(prompts=[PROMPT], completions=[completion], gold=[gold])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
