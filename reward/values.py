"""Whether two formulas are equal: by their normal forms if these decide, by numbers if the values lie far apart.

Numbers reject and never accept: two formulas whose values differ widely at three points are different; two whose
values agree may still differ (that is left open).
"""

import cmath
import math
import operator
import zlib
from collections.abc import Callable
from fractions import Fraction

from reward.algebra import Algebra, Formula, added
from reward.formula import Unread

POINTS = 3
NEAR = 1e-6  # relative to the largest intermediate value; anything closer is left open
_OPERATORS: dict[str, Callable] = {
    "mul": operator.mul,
    "neg": operator.neg,
    "div": operator.truediv,
    "pow": operator.pow,
}
_COMPLEX = {name: getattr(cmath, name) for name in ("sin", "cos", "tan", "exp", "sinh", "cosh", "tanh")}
_COMPLEX |= {"ln": cmath.log, "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan}
_RECIPROCAL = {"sec": cmath.cos, "csc": cmath.sin, "cot": cmath.tan}


def formulas_equal(a: Formula, b: Formula) -> bool | None:
    """True if the normal forms agree, False if the formulas certainly differ, None if it stays open.

    Nothing is rounded here: 0.333 is not 1/3. A decimal beside an irrational number stays open.
    """
    if a.tree == b.tree:
        return True
    decided = _by_form(a, b)
    return _differ_in_numbers(a, b) if decided is None else decided


def _by_form(a: Formula, b: Formula) -> bool | None:
    if a.form is None or b.form is None:
        return None
    algebra = Algebra()
    algebra.bases = a.algebra.bases | b.algebra.bases
    left, right = a.form, b.form
    try:
        if left.den == right.den:
            difference = added(left.num, right.num, -1)
        else:
            difference = added(algebra.poly_mul(left.num, right.den), algebra.poly_mul(right.num, left.den), -1)
    except Unread:
        return None
    if not difference:
        # A denominator with roots of sums or functions may be 0 without looking like it.
        settled = left.den == right.den or (is_settled(left.den) and is_settled(right.den))
        return True if settled or _differ_in_numbers(a, b, same=True) else None
    if not is_settled(difference):
        return None
    rational = left.constant() is not None and right.constant() is not None
    return None if (a.has_decimal or b.has_decimal) and not rational else False


def is_settled(poly: dict) -> bool:
    """Whether all atoms that occur are free of relations between each other."""
    return all(atom in ("pi", "e", "i") or atom.startswith(("v:", "p:")) for monomial in poly for atom, _ in monomial)


def _differ_in_numbers(a: Formula, b: Formula, same: bool = False) -> bool | None:
    """False if the values differ widely at every point; with `same`, True if they agree at every point."""
    near = 1e-3 if a.has_decimal or b.has_decimal else NEAR
    apart, together = 0, 0
    for point in range(POINTS):
        try:
            left, right = _Numbers(point), _Numbers(point)
            x, y = left.value(a.tree), right.value(b.tree)
            scale = max(left.largest, right.largest)
            gap = abs(x - y)
        except (ArithmeticError, ValueError, Unread):
            return None
        if not math.isfinite(gap) or not math.isfinite(scale):
            return None
        apart += gap > near * scale
        together += gap <= 1e-9 * scale
        if not apart + together or (apart and together):
            return None
    if same:
        return together == POINTS or None
    return False if apart == POINTS else None


def approximate(tree: tuple) -> float | None:
    """The real value of a formula without symbols; None if it has none."""
    numbers = _Numbers(None)
    try:
        value = numbers.value(tree)
    except (ArithmeticError, ValueError, Unread):
        return None
    return value.real if abs(value.imag) <= 1e-9 * numbers.largest and math.isfinite(value.real) else None


class _Numbers:
    """Evaluate a tree in complex floats; symbols take fixed positive values that depend on their name and `point`."""

    def __init__(self, point: int | None):
        self.point, self.largest = point, 1e-300

    def value(self, tree: tuple) -> complex:
        result = complex(self._value(tree))
        self.largest = max(self.largest, abs(result))
        return result

    def _value(self, tree: tuple) -> complex:
        kind, parts = tree[0], tree[1:]
        if kind == "num":
            return float(parts[0])
        if kind == "sym":
            return self.symbol(parts[0])
        if kind == "fn":
            return self.function(parts[0], parts[1:])
        values = [self.value(part) for part in parts]
        if kind == "add":
            return sum(values)
        if kind in _OPERATORS:
            return _OPERATORS[kind](*values)
        degree, radicand = values  # "root"
        if radicand.imag == 0 and radicand.real < 0 and degree.real % 2 == 1:
            return -((-radicand) ** (1 / degree))
        return radicand ** (1 / degree)

    def symbol(self, name: str) -> complex:
        if name in ("\\pi", "e", "i"):
            return {"\\pi": math.pi, "e": math.e, "i": 1j}[name]
        if name == "\\infty" or self.point is None:
            raise Unread("no value")
        return 0.3 + 1.5 * zlib.crc32(f"{name} {self.point}".encode()) / 2**32

    def function(self, name: str, arguments: tuple) -> complex:
        values = [self.value(argument) for argument in arguments]
        if name == "degree":
            return values[0]
        if arguments[0][:2] == ("fn", "degree") and name in ("sin", "cos", "tan", "cot", "sec", "csc"):
            values = [values[0] * math.pi / 180]
        if name in _COMPLEX:
            return _COMPLEX[name](values[0])
        if name in _RECIPROCAL:
            return 1 / _RECIPROCAL[name](values[0])
        if name == "abs":
            return abs(values[0])
        if name == "logb":
            return cmath.log(values[1]) / cmath.log(values[0])
        whole = [round(value.real) for value in values]
        if any(abs(value - near) > 1e-9 for value, near in zip(values, whole, strict=True)):
            raise Unread("no whole number")
        if name == "factorial" and 0 <= whole[0] <= 150:
            return float(math.factorial(whole[0]))
        if name == "binom" and 0 <= whole[1] <= 1000 and 0 <= whole[0] <= 1000:
            return float(math.comb(*whole))
        raise Unread("no value")  # floors are discontinuous, `log` has no base


def rounds_to(exact: float, decimal: Fraction, places: int) -> bool:
    """Whether `decimal`, written with `places` decimals, is `exact` rounded or truncated there."""
    unit, gap = 10.0**-places, abs(exact) - abs(float(decimal))
    return exact * decimal >= 0 and -0.5 * unit <= gap * (1 - 1e-9) and gap < unit
