"""Evaluate arithmetic as exact fractions: whole numbers, + - * / with × ÷ − and their LaTeX names, parentheses.

No `eval`, no powers, no unary minus, no decimals. Length, depth and digits are bounded, so the largest value has as
many digits as the text.
"""

import ast
import operator
import re
from fractions import Fraction

MAX_CHARS = 400
MAX_DIGITS = 12
MAX_DEPTH = 30

_SIGNS = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "[": "(", "]": ")"}
)
_COMMANDS = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), (r"\,", " "))
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


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
    tokens = re.findall(r"[0-9]+|\S", text)
    digits = [token for token in tokens if token[0] in "0123456789"]
    if {*tokens} - {*digits, *"+-*/()"} or any(len(number) > MAX_DIGITS for number in digits):
        return None
    depth = 0
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if depth > MAX_DEPTH:
            return None
    try:  # each token apart: 2 ** 3 and 7 // 2 are not Python
        expression = ast.parse(" ".join(str(int(t)) if t[0] in "0123456789" else t for t in tokens), mode="eval")
        return _evaluated(expression.body), [int(number) for number in digits]
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluated(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("no expression of numbers")
