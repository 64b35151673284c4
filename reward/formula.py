r"""Parse one LaTeX or plain-text formula into a tree, without sympy and in time linear in its length.

The grammar covers how answers are written: numbers, symbols, + - * / ^, fractions, roots, functions, factorials,
binomials, absolute values. Anything outside it, or with two readings (`1/2x`, `2\frac{1}{2}x`, `\sqrt12`, `f(2)`),
raises `Unread` and is left to math-verify. A tree is a tuple: ("num", Fraction, written_as_decimal), ("sym", name),
("add" | "mul", items), ("neg", a), ("pow", a, b), ("div", a, b), ("root", degree, a), ("fn", name, argument, …).
"""

import re
from fractions import Fraction

MAX_TOKENS = 600
MAX_DEPTH = 40

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp gcd lcm max min det arg Re Im".split()
)
_ARC = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar".split()
)
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_TIMES = frozenset(("cdot", "times", "ast"))
_NAMED_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|mathit|operatorname|rm|boldsymbol)\s*\{\s*([A-Za-z]+)\s*\}")
_BARE_FRACTION = re.compile(r"\\([dtc]?frac|[dt]?binom)\s*(\d)\s*(\d)(?!\d)")  # TeX takes one digit each
_TOKEN = re.compile(
    r"\s*(?:(?P<num>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+(?:\.\d+)?|\.\d+)|\\(?P<cmd>[A-Za-z]+|[{}|])"
    r"|(?P<word>[A-Za-z]+)|(?P<op>[-+*/^_(){}\[\]|!,']))"
)
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_COMMANDS = (
    "π pi ∞ infty ∪ cup ∩ cap ∈ in ∉ notin ≤ le ≥ ge ⩽ le ⩾ ge ≠ neq ± pm ∓ mp ⋅ cdot ∅ emptyset ≈ approx ∖ setminus "
    "⟨ langle ⟩ rangle θ theta α alpha β beta γ gamma λ lambda μ mu φ phi ω omega σ sigma Δ Delta"
).split()
_UNICODE = {sign: rf"\{name} " for sign, name in zip(_COMMANDS[::2], _COMMANDS[1::2], strict=True)}
_UNICODE |= {sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
_UNICODE |= {"÷": "/", "⁄": "/", "∕": "/", "∗": "*"}
_VULGAR = zip("½⅓⅔¼¾⅕⅛⅜", ("12", "13", "23", "14", "34", "15", "18", "38"), strict=True)
_UNICODE |= {sign: rf"\frac{{{digits[0]}}}{{{digits[1]}}}" for sign, digits in _VULGAR}
_UNICODE_TABLE = str.maketrans(_UNICODE)


class Unread(Exception):
    """The text is not a formula of this grammar, has two readings, or is too long."""


def latex_of(text: str) -> str:
    """`text` with Unicode mathematics spelled in LaTeX: `√2` is `\\sqrt{2}`, `x²` is `x^{2}`, `π` is `\\pi`."""
    if text.isascii():
        return text
    text = re.sub(r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+)", lambda match: "^{" + match[1].translate(_SCRIPTS) + "}", text)
    text = re.sub(r"([₀₁₂₃₄₅₆₇₈₉]+)", lambda match: "_{" + match[1].translate(_SUBSCRIPTS) + "}", text)
    text = re.sub(r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-zπ]))", _root, text)
    text = re.sub(r"∛\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+|[A-Za-z]))", lambda m: _root(m, "[3]"), text)
    return text.translate(_UNICODE_TABLE)


def _root(match: re.Match, degree: str = "") -> str:
    return rf"\sqrt{degree}{{{next(group for group in match.groups() if group is not None)}}}"


def read(text: str) -> tuple:
    """The tree of a formula; `Unread` if there is no unambiguous one."""
    parser = _Parser(_tokens(text))
    tree = parser.sum()
    if parser.at < len(parser.tokens):
        raise Unread("trailing text")
    return tree


def is_formula(text: str) -> bool:
    """Whether `read` succeeds."""
    try:
        read(text)
    except (Unread, RecursionError):
        return False
    return True


def _tokens(text: str) -> list[tuple[str, str]]:
    text = _NAMED_TEXT.sub(r" \1 ", text)
    text = _BARE_FRACTION.sub(r"\\\1{\2}{\3}", text)
    tokens: list[tuple[str, str]] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if not match or len(tokens) >= MAX_TOKENS:
            raise Unread("an unknown sign" if not match else "too long")
        kind = match.lastgroup
        if kind == "word":
            tokens += _split_word(match["word"])
        elif kind == "cmd" and match["cmd"] in ("left", "right", "displaystyle", "limits", "big", "Big"):
            pass
        else:
            tokens.append((kind, match[kind]))
        at = match.end()
    return tokens


def _split_word(word: str) -> list[tuple[str, str]]:
    if word in FUNCTIONS or word in ("sqrt", "pi", "infty"):
        return [("cmd", word)]
    if len(word) > 3:  # a word, not a product of letters
        raise Unread("a word")
    return [("sym", letter) for letter in word]


class _Parser:
    """Recursive-descent parser over the tokens; `at` is the index of the next one."""

    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens, self.at, self.depth = tokens, 0, 0

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def take(self, *values: str) -> bool:
        kind, value = self.peek()
        if kind in ("op", "cmd") and value in values and not (kind == "cmd" and value in "{}|"):
            self.at += 1
            return True
        return False

    def need(self, value: str) -> None:
        if self.peek() != ("op", value):
            raise Unread(f"no {value}")
        self.at += 1

    def sum(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unread("too deep")
        items = []
        while True:
            sign = 1
            while self.peek() in (("op", "+"), ("op", "-")):
                sign = -sign if self.peek()[1] == "-" else sign
                self.at += 1
                if self.peek() in (("op", "+"), ("op", "-")):
                    raise Unread("two signs")
            item = self.product()
            items.append(item if sign > 0 else ("neg", item))
            if self.peek() not in (("op", "+"), ("op", "-")):
                self.depth -= 1
                return items[0] if len(items) == 1 else ("add", *items)

    def product(self) -> tuple:
        """Factors joined by operators or juxtaposed. `a/b` takes one factor; `1/2x` has two readings."""
        result, slashed = self.power(), False
        while True:
            if self.take("*", *_TIMES):
                result, slashed = ("mul", result, self.signed()), False
            elif self.take("/", "div"):
                result, slashed = ("div", result, self.signed()), True
            elif self.starts_factor():
                if slashed:
                    raise Unread("a product after a slash")
                before, start = self.tokens[self.at - 1], self.at
                factor = self.power()
                self.check_neighbours(before, start, result, factor)
                result = ("mul", result, factor)
            else:
                return result

    def check_neighbours(self, before: tuple, start: int, left: tuple, factor: tuple) -> None:
        if factor[0] == "num" or (factor[0] == "pow" and factor[1][0] == "num" and self.tokens[start][0] == "num"):
            raise Unread("a number after a factor")  # 2 3, x2
        if factor[0] == "div" and left[0] == "num" and factor[1][0] == factor[2][0] == "num":
            raise Unread("a mixed number")
        if before[0] == "sym" and before[1] in "fghFGHP" and self.tokens[start] == ("op", "("):
            raise Unread("a function")

    def signed(self) -> tuple:
        if self.take("-"):
            return ("neg", self.power())
        return self.power()

    def starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind in ("num", "sym"):
            return True
        if kind == "op":
            return value in "({[" or (value == "|" and self.depth_of_bars == 0)
        return kind == "cmd" and value not in (*_TIMES, "div", "rfloor", "rceil", "}", "|", "circ", "rvert")

    depth_of_bars = 0

    def power(self) -> tuple:
        return self.powers(self.atom())

    def powers(self, base: tuple) -> tuple:
        while self.take("!"):
            if self.peek() == ("op", "!"):
                raise Unread("double factorial")
            base = ("fn", "factorial", base)
        if self.take("^"):
            if self.is_degree():
                return ("fn", "degree", base)
            exponent = self.argument(signed=True)
            if self.peek() in (("op", "^"), ("op", "'")):
                raise Unread("a double exponent")
            base = ("pow", base, exponent)
            if self.peek() == ("op", "!"):
                raise Unread("factorial of a power")
        elif self.peek() in (("op", "_"), ("op", "'")):
            raise Unread("a subscript")
        return base

    def is_degree(self) -> bool:
        for form in ((("cmd", "circ"),), (("op", "{"), ("cmd", "circ"), ("op", "}"))):
            if tuple(self.tokens[self.at : self.at + len(form)]) == form:
                self.at += len(form)
                return True
        return False

    def argument(self, signed: bool = False) -> tuple:
        r"""The operand of a command or `^`: a group, or one token (`\frac12`, `x^2`, `x^-1`)."""
        if self.peek() == ("op", "{"):
            return self.group("{", "}")
        if signed and self.take("-"):
            return ("neg", self.argument())
        kind, value = self.peek()
        if kind == "op" and value == "(" and signed:
            return self.group("(", ")")
        if kind == "num" and not signed and (len(value) > 1):
            raise Unread("several digits without braces")
        return self.atom()

    def group(self, left: str, right: str) -> tuple:
        self.need(left)
        bars, self.depth_of_bars = self.depth_of_bars, 0
        tree = self.sum()
        self.depth_of_bars = bars
        self.need(right)
        return tree

    def atom(self) -> tuple:
        kind, value = self.peek()
        if kind == "op" and value in "({[":
            return self.group(value, _CLOSING[value])
        self.at += 1
        if kind == "num":
            return ("num", Fraction(value.replace(",", "")), "." in value)
        if kind == "sym":
            return ("sym", value + self.subscript())
        if kind == "op" and value == "|":
            bars, self.depth_of_bars = self.depth_of_bars, 1
            tree = self.sum()
            self.depth_of_bars = bars
            self.need("|")
            return ("fn", "abs", tree)
        if kind == "cmd":
            return self.command(value)
        raise Unread("an incomplete formula")

    def subscript(self) -> str:
        if not self.take("_"):
            return ""
        start = self.at
        if self.peek() == ("op", "{"):
            while self.peek() != ("op", "}"):
                self.at += 1
                if self.at >= len(self.tokens):
                    raise Unread("an open subscript")
            self.at += 1
            return "_" + "".join(value for _, value in self.tokens[start + 1 : self.at - 1])
        self.at += 1
        return "_" + self.tokens[start][1] if start < len(self.tokens) else "_"

    def command(self, name: str) -> tuple:
        if name in ("pi", "infty"):
            return ("sym", "\\" + name)
        if name in ("imath", "mathi"):
            return ("sym", "i")
        if name in _GREEK:
            return ("sym", "\\" + name.removeprefix("var") + self.subscript())
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return ("div", self.argument(), self.argument())
        if name in ("binom", "dbinom", "tbinom"):
            return ("fn", "binom", self.argument(), self.argument())
        if name == "sqrt":
            return self.root()
        if name in ("lfloor", "lceil", "lvert"):
            tree = self.sum()
            if not self.take("r" + name[1:]):
                raise Unread("an open bracket")
            return ("fn", name[1:].replace("vert", "abs"), tree)
        if name in FUNCTIONS and name not in ("gcd", "lcm", "max", "min", "det", "arg", "Re", "Im"):
            return self.function(name)
        raise Unread(f"\\{name}")

    def root(self) -> tuple:
        degree = self.group("[", "]") if self.peek() == ("op", "[") else ("num", Fraction(2), False)
        if self.peek() == ("op", "("):
            return ("root", degree, self.group("(", ")"))
        return ("root", degree, self.argument())

    def function(self, name: str) -> tuple:
        base = exponent = None
        if name == "lg":
            name, base = "log", ("num", Fraction(10), False)
        elif name == "log" and self.take("_"):
            base = self.argument()
        if self.take("^"):
            exponent = self.argument(signed=True)
            if exponent == ("neg", ("num", Fraction(1), False)):
                name, exponent = _ARC.get(name), None
                if name is None:
                    raise Unread("an inverse")
        if self.peek() in (("op", "("), ("op", "{"), ("op", "[")):
            tree = self.group(self.peek()[1], _CLOSING[self.peek()[1]])
            if self.peek() in (("op", "^"), ("op", "!")):
                raise Unread("a power after a function")  # sin(x)^2 or sin((x)^2)
        else:
            tree = self.bare_argument()
        result = ("fn", name, tree) if base is None else ("fn", "logb", base, tree)
        return result if exponent is None else ("pow", result, exponent)

    def bare_argument(self) -> tuple:
        r"""`\sin 2x`: the product that follows, up to an operator or another function."""
        result = self.power()
        while self.starts_factor():
            kind, value = self.peek()
            if (kind == "cmd" and value in FUNCTIONS) or (kind == "op" and value in "([|"):
                break
            before, start = self.tokens[self.at - 1], self.at
            factor = self.power()
            self.check_neighbours(before, start, result, factor)
            result = ("mul", result, factor)
        if self.peek() == ("op", "/") or (self.peek()[0] == "op" and self.peek()[1] in "(["):
            raise Unread("an argument without end")
        return result
