"""A game of several turns: find a secret number from "higher" and "lower".

TRL's contract for `environment_factory`; imports nothing of the kit, so it also runs under `trl.GRPOTrainer`. The
secret is the row's `answer`, which the prompt does not show; the environment pays the return itself (`get_reward`).

    environment: {factory: recipes.environments.guess:GuessNumber, options: {guesses: 4}, max_turns: 5}
"""


class GuessNumber:
    """Answers each guess with "higher", "lower" or "found"; earlier finds pay more.

    `guesses` is the number of guesses that can still be paid.
    """

    def __init__(self, guesses: int = 4) -> None:
        self.guesses = guesses
        self.secret = 0
        self.made = 0
        self.found_at = 0  # number of the guess that found it; 0 while none has

    def reset(self, answer: str, **columns: object) -> None:
        """Start a game; `answer` is the secret number."""
        self.secret, self.made, self.found_at = int(answer), 0, 0

    def guess(self, number: int) -> str:
        """
        Guess the secret number.

        Args:
            number: The guess.

        Returns:
            "higher" if the secret is higher than the guess, "lower" if it is lower, "found" if it is the guess.
        """
        self.made += 1
        if number == self.secret:
            self.found_at = self.found_at or self.made
            return "found"
        return "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        """1 for the first guess, down to 1/`guesses` for the last one that counts; 0 if the number was not found."""
        if not 0 < self.found_at <= self.guesses:
            return 0.0
        return (self.guesses + 1 - self.found_at) / self.guesses
