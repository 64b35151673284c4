"""A game of several turns: find a secret number from "higher" and "lower".

TRL's contract for `environment_factory`; imports nothing of the kit, so it also runs under `trl.GRPOTrainer`. The
secret is the row's `answer`, which the prompt does not show; the environment pays the return itself (`get_reward`).

    environment: {factory: recipes.environments.guess:GuessNumber, options: {guesses: 3}, max_turns: 4}
"""


class GuessNumber:
    """Answers each guess with "higher", "lower" or "found", and the numbers that are left.

    Secrets are 1 to `highest`; `guesses` is the number of guesses that count.
    """

    def __init__(self, guesses: int = 3, highest: int = 7) -> None:
        self.guesses, self.highest = guesses, highest
        self.reset(answer="1")

    def reset(self, answer: str, **columns: object) -> None:
        """Start a game; `answer` is the secret number."""
        self.secret, self.low, self.high = int(answer), 1, self.highest
        self.made, self.found_at = 0, 0  # guesses so far, and the one of them that found it; 0 while none has

    def guess(self, number: int) -> str:
        """
        Guess the secret number.

        Args:
            number: The guess.

        Returns:
            "found", or whether the secret is higher or lower than the guess, with the range that is left.
        """
        self.made += 1
        if number == self.secret:
            self.found_at = self.found_at or self.made
            return "found"
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return f"higher, {self.low} to {self.high}"
        self.high = min(self.high, number - 1)
        return f"lower, {self.low} to {self.high}"

    def get_reward(self) -> float:
        """1 if the number was found within the guesses that count, else 0."""
        return float(0 < self.found_at <= self.guesses)
