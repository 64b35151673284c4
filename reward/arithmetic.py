"""Evaluate arithmetic as exact fractions: whole numbers, + - * / with × ÷ − and their LaTeX names, parentheses.

No `eval`, no powers, no unary minus, no decimals. Length, depth and digits are bounded, so the largest value has as
many digits as the text.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

MAX_CHARS = 400
MAX_DIGITS = 12
MAX_DEPTH = 30

_SIGNS = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "[": "(", "]": ")"}
)
_COMMANDS = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), (r"\,", " "))
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TOKEN = re.compile(r"\s*(\d+|[-+*/()=])")


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None for anything else and for division by zero.

    `expression = n` is accepted if it holds: models like to finish the line.
    """
    if len(text) > MAX_CHARS:
        return None
    text = text.strip().strip("$").translate(_SIGNS)
    for command, sign in _COMMANDS:
        text = re.sub(re.escape(command) + r"(?![A-Za-z])", sign, text)
    for _ in range(MAX_DEPTH):
        text, count = _FRACTION.subn(r"((\1)/(\2))", text)
        if not count:
            break
    left, equals, right = text.partition("=")
    value = _value(left)
    if value is None or not equals:
        return value
    result = re.fullmatch(r"\s*(-?)\s*(\d{1,12})\s*", right)
    return value if result and value[0] == int(result[1] + result[2]) else None


def _value(text: str) -> tuple[Fraction, list[int]] | None:
    tokens, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if not match or match[1] == "=" or len(match[1]) > MAX_DIGITS or not match[1].isascii():
            return None
        tokens.append(match[1])
        at = match.end()
    numbers = [int(token) for token in tokens if token.isdigit()]
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except (ValueError, ZeroDivisionError):
        return None
    return (value, numbers) if parser.at == len(tokens) else None


class _Parser:
    def __init__(self, tokens: Sequence[str]):
        self.tokens, self.at = [*tokens, "end"], 0

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        value = self.product(depth)
        while self.tokens[self.at] in ("+", "-"):
            sign = 1 if self.next() == "+" else -1
            value += sign * self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.tokens[self.at] in ("*", "/"):
            value = value * self.atom(depth) if self.next() == "*" else value / self.atom(depth)
        return value

    def atom(self, depth: int) -> Fraction:
        token = self.next()
        if token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise ValueError("no number")
        value = self.sum(depth + 1)
        if self.next() != ")":
            raise ValueError("an open parenthesis")
        return value
