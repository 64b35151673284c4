r"""Exact comparison of two formulas by a normal form, bounded and without sympy.

A formula becomes a quotient of polynomials over the rationals. Their indeterminates are symbols, π, e, i, roots of
primes, logarithms of primes, exponentials and functions whose argument has the same normal form. Every rewriting is an
identity of the principal values (i² = -1, √12 = 2√3, 4^x = 2^{2x}, cos² = 1 - sin², ln 6 = ln 2 + ln 3), so equal
normal forms mean equal formulas. Unequal ones mean unequal formulas if only symbols, π, i and roots of primes occur
(they are linearly independent over the rationals). Any other difference is decided numerically if the values differ
widely, or left open.
"""

import math
from fractions import Fraction
from functools import lru_cache, reduce

from reward.formula import Unread, read

MAX_TERMS = 300
MAX_BITS = 6000
MAX_WORK = 60_000  # term products per formula, about 0.1 s
MAX_POWER = 200
MAX_FACTORED = 10**10  # by trial division up to the square root

Monomial = tuple  # ((atom, exponent), …) sorted; atoms are strings, exponents int or Fraction above 0
Poly = dict  # Monomial -> Fraction


class Form:
    """A quotient of polynomials with a nonzero denominator."""

    __slots__ = ("den", "num")

    def __init__(self, num: Poly, den: Poly | None = None):
        self.num, self.den = num, den or {(): Fraction(1)}

    def constant(self) -> Fraction | None:
        """The value of a form without atoms, else None."""
        return Fraction(self.num.get((), 0)) / self.den[()] if self.is_whole() and set(self.num) <= {()} else None

    def is_whole(self) -> bool:
        """Whether the denominator is a constant."""
        return set(self.den) == {()}


class Algebra:
    """Arithmetic of forms with a work budget; raises `Unread` when it is exhausted."""

    def __init__(self) -> None:
        self.work = 0
        self.bases: dict[str, Poly] = {}  # for "P:…" atoms: the polynomial under the root

    def poly_mul(self, a: Poly, b: Poly) -> Poly:
        self.work += len(a) * len(b)
        if self.work > MAX_WORK:
            raise Unread("too much work")
        out: Poly = {}
        for left, x in a.items():
            for right, y in b.items():
                merged, special = _merge(left, right)
                if special:
                    for monomial, factor in self.reduced(merged).items():
                        _add_term(out, monomial, x * y * factor)
                else:
                    _add_term(out, merged, x * y)
        return _bounded(out)

    def reduced(self, monomial: Monomial) -> Poly:
        """A monomial with its reducible powers rewritten: i², √2², √(x+1)², cos²."""
        factor, kept, expand = Fraction(1), [], []
        for atom, exponent in monomial:
            whole = math.floor(exponent)
            if atom == "i":
                factor *= (1, 1, -1, -1)[whole % 4]
                exponent = whole % 2
            elif atom.startswith("p:") and whole:
                factor *= _power(Fraction(int(atom[2:])), whole)
                exponent -= whole
            elif atom.startswith("P:") and whole:
                expand.append((self.bases[atom], whole))
                exponent -= whole
            elif atom.startswith("f:cos:") and whole >= 2:
                sine = ((f"f:sin:{atom[6:]}", 2),)
                expand.append(({(): Fraction(1), sine: Fraction(-1)}, whole // 2))
                exponent -= 2 * (whole // 2)
            if exponent:
                kept.append((atom, exponent))
        result: Poly = {tuple(kept): factor}
        for base, count in expand:
            result = self.poly_mul(result, self.poly_power(base, count))
        return result

    def poly_power(self, base: Poly, exponent: int) -> Poly:
        if exponent > MAX_POWER:
            raise Unread("a large power")
        result: Poly = {(): Fraction(1)}
        for bit in bin(exponent)[2:]:
            result = self.poly_mul(result, result)
            if bit == "1":
                result = self.poly_mul(result, base)
        return result

    def add(self, a: Form, b: Form) -> Form:
        if a.den == b.den:
            return Form(_sum(a.num, b.num), a.den)
        left, right = self.poly_mul(a.num, b.den), self.poly_mul(b.num, a.den)
        return Form(_sum(left, right), self.poly_mul(a.den, b.den))

    def mul(self, a: Form, b: Form) -> Form:
        return self.tidy(self.poly_mul(a.num, b.num), self.poly_mul(a.den, b.den))

    def div(self, a: Form, b: Form) -> Form:
        return self.tidy(self.poly_mul(a.num, b.den), self.poly_mul(a.den, b.num))

    def tidy(self, num: Poly, den: Poly) -> Form:
        """The quotient with a constant denominator divided out and √2 or i moved out of a single-term one."""
        if not den:
            raise Unread("division by zero")
        if len(den) == 1:
            ((monomial, factor),) = den.items()
            rest = []
            for atom, exponent in monomial:
                if atom == "i":  # 1/i = -i
                    num = self.poly_mul(num, {(("i", 1),): Fraction(-1)})
                elif atom.startswith("p:"):  # 1/2^{1/3} = 2^{2/3}/2
                    num = self.poly_mul(num, {((atom, 1 - exponent),): Fraction(1, int(atom[2:]))})
                else:
                    rest.append((atom, exponent))
            return Form({m: c / factor for m, c in num.items()}, {tuple(rest): Fraction(1)})
        return Form(num, den)

    def power(self, base: Form, exponent: Form) -> Form:
        value = exponent.constant()
        if value is None:
            return self.exponential(base, exponent)
        if value.denominator == 1:
            return self.whole_power(base, int(value))
        return self.root_power(base, value)

    def whole_power(self, base: Form, exponent: int) -> Form:
        constant = base.constant()
        if constant is not None:
            if not constant and exponent <= 0:
                raise Unread("a power of zero")
            return _form(_power(constant, exponent))
        if exponent < 0:
            base, exponent = self.div(_form(1), base), -exponent
        return self.tidy(self.poly_power(base.num, exponent), self.poly_power(base.den, exponent))

    def root_power(self, base: Form, exponent: Fraction) -> Form:
        """`base ** exponent`, principal value, for a non-integer exponent."""
        constant = base.constant()
        if constant is not None:
            if constant < 0 and exponent.denominator != 2:
                raise Unread("a root of a negative number")
            result = self.prime_power(abs(constant), exponent)
            if constant < 0:
                result = self.mul(result, Form(self.reduced((("i", exponent.numerator % 4),))))
            return result
        if not base.is_whole():
            raise Unread("a root of a quotient")
        poly = {m: c / base.den[()] for m, c in base.num.items()}
        content = _content(poly)
        result = self.prime_power(content, exponent)
        poly = {m: c / content for m, c in poly.items()}
        if len(poly) == 1:
            ((monomial, sign),) = poly.items()
            alone = len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0] != "i"
            if sign == 1 and (alone or all(_is_positive(atom) for atom, _ in monomial)):
                for atom, power in monomial:
                    result = self.mul(result, self.atom_power(atom, power * exponent))
                return result
        atom = f"P:{_key(poly)}"
        self.bases[atom] = poly
        return self.mul(result, self.atom_power(atom, exponent))

    def atom_power(self, atom: str, exponent: Fraction) -> Form:
        term = self.reduced(((atom, abs(exponent)),))
        return Form(term) if exponent > 0 else self.tidy({(): Fraction(1)}, term)

    def prime_power(self, value: Fraction, exponent: Fraction) -> Form:
        """A positive rational to a rational power, expressed in roots of primes."""
        if not value:
            if exponent < 0:
                raise Unread("division by zero")
            return Form({})
        result = _form(1)
        for prime, count in _factored_quotient(value):
            result = self.mul(result, self.atom_power(f"p:{prime}", count * exponent))
        return result

    def exponential(self, base: Form, exponent: Form) -> Form:
        """`e^{2x+1}` as e·(e^x)², `4^x` as (2^x)²: one atom per base and monomial of the exponent."""
        if not exponent.is_whole():
            raise Unread("a quotient in an exponent")
        terms = {m: c / exponent.den[()] for m, c in exponent.num.items()}
        shift = terms.pop((), Fraction(0))
        constant = base.constant()
        if constant is not None and constant > 0:
            powers = [(str(prime), count) for prime, count in _factored_quotient(constant)]
        elif base.num == {(("e", 1),): 1} and base.is_whole():
            powers = [("e", 1)]
        elif constant == -1 or (len(base.num) == 1 and next(iter(base.num)) and base.is_whole()):
            powers = [(_key(base.num), 1)]
            if shift.denominator != 1:
                raise Unread("a broken shift of an exponent")
        else:
            raise Unread("a base")
        result = self.power(base, _form(shift)) if shift else _form(1)
        for monomial, factor in terms.items():
            if powers == [("e", 1)] and monomial == (("i", 1), ("pi", 1)):
                result = self.mul(result, self.unit(factor))
                continue
            for name, count in powers:
                result = self.mul(result, self.atom_power(f"w:{name}:{_key({monomial: 1})}", factor * count))
        return result

    def unit(self, turns: Fraction) -> Form:
        """e^{iπ·turns}."""
        imaginary = Form({(("i", 1),): Fraction(1)})
        sine, cosine = _sine(self, turns), _sine(self, turns + Fraction(1, 2))
        if sine is None or cosine is None:
            raise Unread("an angle")
        return self.add(cosine, self.mul(imaginary, sine))

    def function(self, name: str, argument: Form) -> Form:
        """A function of one argument: its exact value if there is one, else an atom named by the argument's form."""
        constant = argument.constant()
        if name in ("sin", "cos", "tan", "cot", "sec", "csc"):
            return self.trigonometric(name, argument)
        if name == "exp":
            return self.power(Form({(("e", 1),): Fraction(1)}), argument)
        if name in ("floor", "ceil") and constant is not None:
            return _form(math.floor(constant) if name == "floor" else math.ceil(constant))
        if name == "abs" and constant is not None:
            return _form(abs(constant))
        if name in ("ln", "log"):
            return self.logarithm(name, argument)
        if name == "factorial":
            if constant is not None and constant.denominator == 1 and 0 <= constant <= 500:
                return _form(math.factorial(int(constant)))
            if constant is not None:
                raise Unread("a factorial")
        if name not in ("abs", "arcsin", "arctan", "sinh", "tanh"):
            return self.opaque(name, argument)
        argument, sign = _without_sign(argument)
        atom = self.opaque(name, argument)
        return atom if sign > 0 or name == "abs" else negated(atom)

    def opaque(self, name: str, *arguments: Form) -> Form:
        keys = "|".join(f"{_key(form.num)}/{_key(form.den)}" for form in arguments)
        return Form({((f"f:{name}:{keys}", 1),): Fraction(1)})

    def trigonometric(self, name: str, argument: Form) -> Form:
        if name in ("tan", "cot", "sec", "csc"):
            sine, cosine = self.trigonometric("sin", argument), self.trigonometric("cos", argument)
            quotients = {
                "tan": (sine, cosine),
                "cot": (cosine, sine),
                "sec": (_form(1), cosine),
                "csc": (_form(1), sine),
            }
            return self.div(*quotients[name])
        turns = None
        if argument.is_whole() and set(argument.num) <= {(("pi", 1),)}:
            turns = Fraction(argument.num.get((("pi", 1),), 0)) / argument.den[()]
            if (value := _sine(self, turns + (Fraction(1, 2) if name == "cos" else 0))) is not None:
                return value
        argument, sign = _without_sign(argument)
        times = _content(argument.num) if argument.num and argument.is_whole() else Fraction(1)
        if turns is None and times.denominator == 1 and 2 <= times <= 6:
            value = self.multiple_angle(name, int(times), self.div(argument, _form(times)))
        else:
            value = self.opaque(name, argument)
        return value if sign > 0 or name == "cos" else negated(value)

    def multiple_angle(self, name: str, times: int, angle: Form) -> Form:
        """sin or cos of `times * angle` by the addition theorems."""
        sine, cosine = self.opaque("sin", angle), self.opaque("cos", angle)
        s, c = sine, cosine
        for _ in range(times - 1):
            minus = negated(self.mul(s, sine))
            s, c = self.add(self.mul(s, cosine), self.mul(c, sine)), self.add(self.mul(c, cosine), minus)
        return s if name == "sin" else c

    def logarithm(self, name: str, argument: Form) -> Form:
        """ln of a positive rational as a sum over primes; `log` without a base leaves its base open."""
        if argument.num == {(("e", 1),): 1} and argument.is_whole() and name == "ln":
            return _form(1)
        constant = argument.constant()
        if constant is None:
            return self.opaque(name, argument)
        if constant <= 0:
            raise Unread("a logarithm of a number that is not positive")
        poly: Poly = {}
        for prime, count in _factored_quotient(constant):
            _add_term(poly, ((f"l:{name}:{prime}", 1),), Fraction(count))
        return Form(poly)


def _form(value: Fraction | int) -> Form:
    return Form({(): Fraction(value)} if value else {})


def negated(form: Form) -> Form:
    return Form({monomial: -factor for monomial, factor in form.num.items()}, form.den)


def _merge(left: Monomial, right: Monomial) -> tuple[Monomial, bool]:
    """The product of two monomials, and whether it contains a power that can be rewritten."""
    if not left or not right:
        return left or right, False
    exponents = dict(left)
    special = False
    for atom, exponent in right:
        if atom in exponents:
            exponents[atom] += exponent
            special = special or atom == "i" or atom[:2] in ("p:", "P:") or atom.startswith("f:cos:")
        else:
            exponents[atom] = exponent
    return tuple(sorted(exponents.items())), special


def _add_term(poly: Poly, monomial: Monomial, factor: Fraction) -> None:
    total = poly.get(monomial, 0) + factor
    if total:
        poly[monomial] = total
    else:
        poly.pop(monomial, None)


def _sum(a: Poly, b: Poly) -> Poly:
    return _bounded(added(a, b, 1))


def added(a: Poly, b: Poly, times: int) -> Poly:
    """The polynomial a + times * b."""
    out = dict(a)
    for monomial, factor in b.items():
        _add_term(out, monomial, times * factor)
    return out


def _bounded(poly: Poly) -> Poly:
    if len(poly) > MAX_TERMS or any(
        max(factor.numerator.bit_length(), factor.denominator.bit_length()) > MAX_BITS for factor in poly.values()
    ):
        raise Unread("too large")
    return poly


def _power(value: Fraction, exponent: int) -> Fraction:
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS and abs(value) != 1 and value:
        raise Unread("a large number")
    return value ** (exponent if abs(value) != 1 else exponent % 2)


@lru_cache(maxsize=4096)
def _factored(value: int) -> tuple[tuple[int, int], ...]:
    """The prime factors of a positive integer with their counts."""
    if value > MAX_FACTORED:
        raise Unread("a large number to factor")
    found, prime = [], 2
    while prime * prime <= value:
        count = 0
        while value % prime == 0:
            value, count = value // prime, count + 1
        if count:
            found.append((prime, count))
        prime += 1 if prime == 2 else 2
    return (*found, (value, 1)) if value > 1 else tuple(found)


def _factored_quotient(value: Fraction) -> tuple[tuple[int, int], ...]:
    return *_factored(value.numerator), *((prime, -count) for prime, count in _factored(value.denominator))


def _content(poly: Poly) -> Fraction:
    """The positive rational factor whose removal leaves coprime integer coefficients."""
    if not poly:
        raise Unread("a root of zero")
    factors = [Fraction(factor) for factor in poly.values()]
    return Fraction(math.gcd(*(f.numerator for f in factors)), math.lcm(*(f.denominator for f in factors)))


def _is_positive(atom: str) -> bool:
    return atom in ("pi", "e") or atom.startswith(("p:", "l:"))


def _key(poly: Poly) -> str:
    return "(" + "+".join(f"{factor}*{monomial}" for monomial, factor in sorted(poly.items(), key=str)) + ")"


def _without_sign(argument: Form) -> tuple[Form, int]:
    """The argument of an odd or even function with a positive first coefficient, and the sign factored out."""
    first = min(argument.num.items(), key=lambda item: str(item[0]), default=((), 1))[1]
    return (argument, 1) if first > 0 else (negated(argument), -1)


def _sine(algebra: Algebra, turns: Fraction) -> Form | None:
    """sin(π·turns) for multiples of π/12 with simple roots; None for other angles."""
    turns %= 2
    sign = 1
    if turns > 1:
        turns, sign = turns - 1, -1
    if turns > Fraction(1, 2):
        turns = 1 - turns
    squares = {Fraction(0): 0, Fraction(1, 6): 1, Fraction(1, 4): 2, Fraction(1, 3): 3, Fraction(1, 2): 4}
    if turns not in squares:
        return None
    return algebra.mul(_form(Fraction(sign, 2)), algebra.prime_power(Fraction(squares[turns]), Fraction(1, 2)))


class Formula:
    """A formula with its tree, its normal form (None if it has none) and whether it contains a decimal."""

    def __init__(self, text: str):
        self.tree = read(text)
        self.has_decimal = _has_decimal(self.tree)
        self.algebra = Algebra()
        try:
            self.form: Form | None = normal_form(self.tree, self.algebra)
        except Unread:
            self.form = None


@lru_cache(maxsize=8192)
def formula(text: str) -> Formula | None:
    """The formula that `text` spells; None if it is outside the grammar."""
    try:
        return Formula(text)
    except (Unread, RecursionError):
        return None


def _has_decimal(tree: tuple) -> bool:
    if tree[0] == "num":
        return tree[2]
    return any(_has_decimal(part) for part in tree[1:] if isinstance(part, tuple))


def normal_form(tree: tuple, algebra: Algebra) -> Form:
    """The form of a tree; `Unread` if a limit is reached or a part has no form."""
    kind, parts = tree[0], tree[1:]
    if kind == "num":
        return _form(parts[0])
    if kind == "sym":
        if parts[0] == "\\infty":
            raise Unread("infinity")
        return Form({(({"\\pi": "pi", "e": "e", "i": "i"}.get(parts[0], f"v:{parts[0]}"), 1),): Fraction(1)})
    if kind == "fn" and parts[0] in ("sin", "cos", "tan", "cot", "sec", "csc") and parts[1][:2] == ("fn", "degree"):
        inner = normal_form(parts[1][2], algebra)
        return algebra.function(parts[0], algebra.mul(inner, Form({(("pi", 1),): Fraction(1, 180)})))
    if kind == "fn" and parts[0] == "degree":
        return normal_form(parts[1], algebra)
    values = [normal_form(part, algebra) for part in parts if isinstance(part, tuple)]
    if kind == "add":
        return reduce(algebra.add, values)
    if kind == "mul":
        return algebra.mul(*values)
    if kind == "neg":
        return negated(values[0])
    if kind == "div":
        return algebra.div(*values)
    if kind == "pow":
        return algebra.power(*values)
    if kind == "root":
        return _root(algebra, *values)
    return _function(algebra, parts[0], values)


def _root(algebra: Algebra, degree: Form, value: Form) -> Form:
    n, constant = degree.constant(), value.constant()
    if n is None or n.denominator != 1 or not 2 <= n <= 100:
        raise Unread("a degree")
    if constant is not None and constant < 0 and n % 2:  # \sqrt[3]{-8} is -2
        return negated(algebra.root_power(_form(-constant), 1 / n))
    return algebra.root_power(value, 1 / n) if value.num else value


def _function(algebra: Algebra, name: str, values: list[Form]) -> Form:
    if name == "binom":
        n, k = (value.constant() for value in values)
        if n is None or k is None:
            return algebra.opaque(name, *values)
        if n.denominator != 1 or k.denominator != 1 or not 0 <= n <= 1000 or k < 0:
            raise Unread("a binomial")
        return _form(math.comb(int(n), int(k)))
    if name == "logb":
        base, value = values
        if base.constant() is not None and (base.constant() <= 0 or base.constant() == 1):
            raise Unread("a base of a logarithm")
        return algebra.div(algebra.function("ln", value), algebra.function("ln", base))
    return algebra.function(name, values[0])
