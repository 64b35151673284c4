"""The guessing game of recipes/environments with a tool that hangs in 5 % of its calls, far beyond its time limit."""

import random
import time

from recipes.environments.guess import GuessNumber

HANGS = 0.05
HANGS_S = 4.0
calls = random.Random(0)  # one sequence for all games: which of them hangs depends on who calls first


class HangingGuess(GuessNumber):
    def guess(self, number: int) -> str:
        """
        Guess the secret number.

        Args:
            number: The guess.

        Returns:
            "higher" if the secret is higher than the guess, "lower" if it is lower, "found" if it is the guess.
        """
        if calls.random() < HANGS:
            time.sleep(HANGS_S)
        return super().guess(number)
