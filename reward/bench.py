"""Prints how many completions per second the math reward scores: `python -m reward.bench`."""

import time
from types import SimpleNamespace

from reward import reward_functions

COMPLETIONS = 1024
REASONING = "The next line of reasoning follows, 12 + 30 = 42, and the work goes on. " * 56  # about 4,000 characters
PROMPT = [{"role": "user", "content": "What is it?\nPut the final answer in \\boxed{}."}]


def main() -> None:
    config = SimpleNamespace(functions=["math"], weights=None, workers=2, timeout_s=2.0, max_unknown_fraction=1.0)
    (reward,), _ = reward_functions(config)
    numbers = range(COMPLETIONS)
    # 10^10 towers differ by their base, so that none is saved by comparing equal pairs once.
    cases = {
        "plain numbers": [(str(n), str(n)) for n in numbers],
        "roots (algebra, all different)": [(rf"\sqrt{{{n}}}+1", rf"1+\sqrt{{{n}}}") for n in numbers],
        "polynomials (algebra, all different)": [(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n}") for n in numbers],
        "plain numbers, 1 % towers": [(f"{n + 2}^{{10^{{10}}}}" if n % 100 == 0 else str(n), str(n)) for n in numbers],
    }
    for name, pairs in cases.items():
        completions = [f"{REASONING}\\boxed{{{answer}}}" for answer, _ in pairs]
        started = time.perf_counter()
        rewards = reward(prompts=[PROMPT] * COMPLETIONS, completions=completions, gold=[gold for _, gold in pairs])
        seconds = time.perf_counter() - started
        print(f"{name}: {seconds:.2f} s, {COMPLETIONS / seconds:,.0f}/s, {rewards.count(None)} undecided", flush=True)


if __name__ == "__main__":
    main()
