"""Compare two answers without sympy: plain numbers as exact fractions, words by their letters, the rest undecided.

Most answers of most runs are plain numbers, and those need no worker process. Undecided comparisons go to the pool
(`None`), with one exception: prediction shapes that a lenient symbolic parser would pay although they are wrong (`4=5`
for 5, `12_8` for 12, `5 million` for 5, `2 3` for 5) are rejected here. Nothing here evaluates an expression; digits
and exponents are bounded before a number is built.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from reward import shape
from reward.algebra import formula
from reward.formula import is_formula, latex_of
from reward.shape import NAME, relation_sides
from reward.units import NOT_UNITS, SCALES, TEXT, unit_name, unit_of, without_unit
from reward.values import approximate, formulas_equal, rounds_to

MAX_ANSWER_CHARS = 4096  # a longer prediction is not an answer; a longer gold is a bad row
MAX_DIGITS = 1000
LONG_DECIMAL = 6  # decimal places a decimal needs to stand for a fraction
MAX_EXPONENT = 1000  # 10^1000 is a 3,300-bit integer; larger powers are left to the workers

_CHARACTERS = {
    **dict.fromkeys(map(ord, "\u2212\u2012\u2013\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u2007\u3000"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), None),
    0xFF0C: ",",
    0xFF0E: ".",
    0xFF05: "%",
    0xFF04: "$",
    ord("\u00d7"): "\\times ",
    ord("\u00b7"): "\\cdot ",
    ord("\u00b0"): "^\\circ ",
}
_THIN_GROUPS = re.compile("(?<!\\d)\\d{1,3}(?:[\u2009\u202f]\\d{3})+(?!\\d)")  # 10 000 as typeset by ISO 80000
# 2,74 and 0,111; 2,740 is a number with a thousands separator.
_DECIMAL_COMMA = re.compile(r"([+-]?(?:\d+(?=,(?!\d{3}(?!\d)))|0))(?:,)(\d+)((?:\s.*)?)", re.DOTALL)
_DECIMALS = re.compile(r"\s*[+-]?\s*(?:\\?\$|[€£¥₹])?\s*[+-]?[\d,]*\.(\d+)")
_RATIO = re.compile(r"\d{1,9}(?:\s*:\s*\d{1,9})+")
_SPACED_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?")  # 1 000, if it is the whole answer
_SQUARE_METERS = re.compile(r"(?<=\d)\s*([kcdm]?m)([²³])(?=\s*$)")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))

_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|middle|[bB]igg?[lrm]?|mathopen|mathclose|mathstrut)(?![A-Za-z])"
    r"(?:\.(?!\d))?"
)


def _repeating(match: re.Match) -> str:
    r"""0.1\overline{6} as the fraction it denotes."""
    whole, start, period = match.groups()
    if len(match[0]) > 100:
        return match[0]
    digits = int(whole + start + period or "0") - int(whole + start or "0")
    value = Fraction(digits, 10 ** len(start) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_SPELLINGS = [
    (re.compile(pattern), spelled)
    for pattern, spelled in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"^\s*\\boxed\s*\{([^{}]*)\}\s*$", r"\1"),
        (r"^\s*\\text\s*\{\s*\$?([^{}$]*\d[^{}$]*)\$?\s*\}\s*$", r"\1"),
        (r"(?<![\d.,])(\d*)\.(\d*)\\dot\s*\{?(\d)\}?(?![\d\\])", _repeating),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\degree(?![A-Za-z])", r"^\\circ"),
        (r"\\(?:text|mathrm)\s*\{\s*\\?\$\s*\}", r"\\$"),
        (r"\\(?:text|mathrm)\s*\{\s*\}", ""),
        (r"(?<=\d)(?:\^?\s*\{?\s*(?:\\(?:text|mathrm|textrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}{0,2})$", ""),
        (r"(?<![\d.,])(\d*)\.(\d*)\\overline\s*\{(\d+)\}", _repeating),
    )
]
_BASED = re.compile(
    r"\(?([\dA-Fa-f][\dA-Fa-f,]*)\)?\s*_\s*\{?\s*(\d+|two|three|four|five|six|seven|eight|nine|ten|sixteen)\s*\}?"
)
_BASES = dict(two="2", three="3", four="4", five="5", six="6", seven="7", eight="8", nine="9", ten="10", sixteen="16")
_NAMED_OPTION = re.compile(r"([B-H])\s+[A-Z][a-z]+")  # "C Cecile"; "A" may be an article
_CHOICE = re.compile(r"(?:\\text(?:bf|rm)?\s*\{)?\(?([A-H])(?:\)|[.:](?=\s|\}|$))\}?[.:]?\s*(\S.*)")
_LABEL = re.compile(r"^(?:[Oo]ption|[Cc]hoice|[Aa]nswer:?)\s+(?=\(?[A-H]\)?$)")

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_SCIENTIFIC = re.compile(
    rf"({_NUMBER})(?:[eE]([+-]?\d{{1,5}})|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{\s*(-?\d{{1,5}})\s*\}}|(\d)))"
)
_TEX_FRACTION = r"\\frac\s*(?:\{\s*([+-]?" + _NUMBER + r")\s*\}\s*\{\s*(" + _NUMBER + r")\s*\}|(\d)\s*(\d))"
_FRACTION = re.compile(rf"{_TEX_FRACTION}|({_NUMBER})\s*/\s*({_NUMBER})")
_MIXED = re.compile(r"(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))|(\d+)\s+(\d+)/(\d+)")
_PLAIN = re.compile(_NUMBER)
_SIGN_AND_CURRENCY = re.compile(r"([+-]?)\s*(\\?\$|[€£¥₹])?\s*([+-]?)\s*")

# Marks a second statement or a second value in one answer.
_CONNECTIVE = re.compile(
    r"\\(?:lor|land|vee|wedge|implies|impliedby|iff|therefore|because|(?:[Ll]ong)?(?:[Ll]eft)?[Rr]ightarrow|Leftarrow)"
    r"(?![A-Za-z])|[\u2227\u2228\u2190-\u2194\u21d0-\u21d4\u27f5-\u27fa\u2234\u2235]"
    r"|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
)


@dataclass(frozen=True)
class Policy:
    """Choices on which people differ about answers; every field is an option of reward "math" (described there)."""

    tolerance: float = 0.0
    ordered: bool = False
    units: str = "ignored"
    several: str = "all"
    unicode_digits: bool = True
    form: str = "boxed"  # "stated" and "lenient" also compare less strictly


DEFAULT = Policy()


@dataclass(frozen=True)
class PlainNumber:
    """A written number: its exact value, whether a percent sign followed, and the unit ("" for none)."""

    value: Fraction
    percent: bool = False
    unit: str = ""


def normalized(text: str, unicode_digits: bool = True) -> str:
    r"""The answer without its typography: math delimiters, bold, spacing commands, Unicode minus and digits.

    Decimal digits of any script become ASCII (their value is the same); superscripts do not (5² is not 52).
    """
    text = _THIN_GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = text.translate(_CHARACTERS)
    if not text.isascii():  # a digit that must not count becomes a meaningless character
        digit = (
            (lambda c: str(unicodedata.decimal(c))) if unicode_digits else (lambda c: c if c.isascii() else "\ufffd")
        )
        text = "".join(digit(c) if unicodedata.category(c) == "Nd" else c for c in text)
    text = text.strip()
    for _ in range(4):
        for left, right in _WRAPPERS:
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                inner = text[len(left) : -len(right)]
                if left not in inner:  # "$5$ and $6$" is not one wrapped formula
                    text = inner.strip()
                    break
        else:
            break
    text = re.sub(r"(?<=\d),\s*\\!\s*(?=\d{3})", ",", text)  # 32,\! 349
    text = re.sub(r"\s*\{\s*,\s*\}\s*", ",", text).replace("\\!", "")
    text = text.replace("\\\\", "\\cr ") if "\\begin" in text else re.sub(r"\\\\(?=[A-Za-z({\[]|$)", r"\\", text)
    text = re.sub(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", "", text)  # 10\,000 is one number
    text = _LAYOUT.sub("", text)
    text = re.sub(r"\\(?:[,;: ]|q?quad(?![A-Za-z]|_)|q?quad(?=[a-z]_))|~(?!=)", " ", text)
    text = re.sub(r"(?<=[\w)}])\s*\*\*\s*(?=[\w(])", "^", text)  # Python's power
    text = re.sub(r"\+\s+-\s*(?=[\w\\(.])", "- ", text)  # 14 + -1i
    text = _SQUARE_METERS.sub(lambda m: rf" \text{{ {m[1]}^{'2' if m[2] == '²' else '3'}}}", text)
    for pattern, spelled in _SPELLINGS:
        text = pattern.sub(spelled, text)
    text = text.strip()
    if re.search(r"(?<!\\)\\$", text):
        text = text[:-1].rstrip()
    if text.endswith((".", ",", ";", ":")) and not text.endswith(".."):
        text = text[:-1].rstrip("\\ ")
    return text.strip()


def plain_number(text: str) -> PlainNumber | None:
    """The number that a `normalized` text spells, with sign, currency, percent or unit; None for anything else."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    head = _SIGN_AND_CURRENCY.match(text)
    if head[1] and head[3]:
        return None
    rest = text[head.end() :]
    value, rest = _leading_value(rest)
    if value is None:
        return None
    if "-" in (head[1], head[3]):
        value = -value
    currency = head[2] or ""
    spaced, rest = rest[:1].isspace(), rest.strip()
    percent = re.fullmatch(r"\\?%|(?i:percent(?:age)?|pct)", TEXT.sub(r" \1", rest).strip()) is not None
    if percent or not rest:
        return PlainNumber(value, percent, unit_name(currency))
    if not currency and re.fullmatch(r"\\?\$|[€£¥₹]", rest):
        return PlainNumber(value, False, unit_name(rest))
    scale, rest = _leading_scale(rest)
    unit = unit_of(rest, spaced) if rest else ""
    if unit is None or (unit and currency and unit != unit_name(currency)):
        return None
    return PlainNumber(value * scale, False, unit or unit_name(currency))


def _leading_value(text: str) -> tuple[Fraction | None, str]:
    """The unsigned number at the start of `text` in any of its spellings, and the text after it."""
    for pattern, build in ((_MIXED, _mixed), (_SCIENTIFIC, _scientific), (_FRACTION, _fraction), (_PLAIN, _decimal)):
        if match := pattern.match(text):
            rest = text[match.end() :]
            # "12_8", "3/4/5", "1,2" and "5.6.7" continue: the match is only part of something else.
            if re.match(r"\s*[\d_/,.!*+=<>|&-]", rest):
                return None, text
            return build(match), rest
    return None, text


def _decimal(match: re.Match) -> Fraction | None:
    digits = match[0].replace(",", "")
    return Fraction(digits.rstrip(".")) if len(digits) <= MAX_DIGITS else None


def _scientific(match: re.Match) -> Fraction | None:
    exponent = int(match[2] or match[3] or match[4])
    mantissa = _decimal(_PLAIN.fullmatch(match[1]))
    if mantissa is None or abs(exponent) > MAX_EXPONENT:
        return None
    return mantissa * Fraction(10) ** exponent


def _fraction(match: re.Match) -> Fraction | None:
    above, below = (group for group in match.groups() if group is not None)
    sign = -1 if above.startswith("-") else 1
    above, below = _decimal(_PLAIN.fullmatch(above.lstrip("+-"))), _decimal(_PLAIN.fullmatch(below))
    return sign * above / below if above is not None and below else None


def _mixed(match: re.Match) -> Fraction | None:
    whole, above, below = (group for group in match.groups() if group is not None)
    if max(len(whole), len(above), len(below)) > MAX_DIGITS or not 0 < int(above) < int(below):
        return None
    return int(whole) + Fraction(int(above), int(below))


def _leading_scale(rest: str) -> tuple[int, str]:
    """Factor of a scale word such as `million` after a number (1 if there is none), and the rest of the text."""
    words = TEXT.sub(r" \1 ", rest).strip()
    first, _, tail = words.partition(" ")
    scale = SCALES.get(first.lower(), 1)
    return (scale, tail.strip()) if scale > 1 else (1, rest)


def numbers_equal(predicted: PlainNumber, gold: PlainNumber, policy: Policy = DEFAULT) -> bool:
    """Exact equality of two written numbers, or equality within `policy.tolerance` of the gold.

    A percent sign on only one side is read both ways (50% equals 50, the answer to "what percent", and 0.5). A unit on
    only one side is ignored unless the policy requires the gold's. Two different units are different answers; they are
    not converted.
    """
    if not _units_agree(predicted.unit, gold.unit, policy):
        return False
    if predicted.percent == gold.percent:
        return _near(predicted.value, gold.value, policy)
    with_sign, without = (predicted, gold) if predicted.percent else (gold, predicted)
    return any(_near(without.value, value, policy) for value in (with_sign.value, with_sign.value / 100))


def _near(predicted: Fraction, gold: Fraction, policy: Policy) -> bool:
    return predicted == gold or abs(predicted - gold) <= Fraction(policy.tolerance) * abs(gold)


def _units_agree(predicted: str, gold: str, policy: Policy) -> bool:
    if predicted and gold:
        return predicted == gold
    return policy.units != "required" or not gold


def decide(predicted: str | None, gold: str, policy: Policy = DEFAULT) -> bool | None:
    """Whether the two answers are equal, if that can be decided exactly and cheaply; None if it needs sympy."""
    if predicted is None or not predicted.strip() or len(predicted) > MAX_ANSWER_CHARS:
        return False
    return compare(prepared(predicted, policy), prepared(gold, policy), policy)


def prepared(text: str, policy: Policy = DEFAULT) -> str:
    """The answer in the form used for comparison: `normalized`, with Unicode mathematics spelled in LaTeX."""
    text = latex_of(normalized(text, policy.unicode_digits))
    return text.replace(" ", "") if policy.form != "boxed" and _SPACED_GROUPS.fullmatch(text) else text


def compare(predicted: str, gold: str, policy: Policy = DEFAULT, symbolic: "shape.Leaf | None" = None) -> bool | None:
    """`decide` on `prepared` texts; `symbolic` is called for single values that stay open here."""
    if predicted and _squeezed(predicted) == _squeezed(gold):
        return True
    if not predicted or not gold:
        return False
    if "\\boxed" in predicted and "\\boxed" not in gold:
        return False  # "8 \boxed{7}": math-verify would read only the inner box
    if policy.form != "boxed" and (option := _NAMED_OPTION.fullmatch(gold)) and _words(predicted) == option[1]:
        return True
    verbal = _verbal(predicted, gold)
    if verbal is not None:
        return verbal
    if policy.form != "boxed":
        predicted, gold = _in_one_locale(predicted, _reference_value(gold))
    stated = _stated(predicted, gold, policy.form)
    if stated is None or _says_more(stated, gold):
        return False

    def leaf(one: str, other: str) -> bool | None:
        decided = _values_equal(one, other, policy)
        return symbolic(one, other) if decided is None and symbolic else decided

    return shape.compare(stated, gold, leaf, policy.ordered, policy.several)


def _in_one_locale(predicted: str, gold: str) -> tuple[str, str]:
    """Convert a decimal comma to a point if the other side is written with a point (2,74 against 2.74)."""
    if re.fullmatch(r"[+-]?\d*\.\d+", gold) and (match := _DECIMAL_COMMA.fullmatch(predicted)):
        return f"{match[1]}.{match[2]}{match[3]}", gold
    if (match := _DECIMAL_COMMA.fullmatch(gold)) and len(match[2]) > 1 and re.match(r"[+-]?\d*\.\d", predicted):
        return predicted, f"{match[1]}.{match[2]}{match[3]}"
    return predicted, gold


def _reference_value(gold: str) -> str:
    """The exact side of a reference that also gives a rounded value: `\\sqrt{3} \\approx 1.73`."""
    sides, operators = relation_sides(gold) if "approx" in gold else ([], [])
    if operators and operators[-1] == "~" and sides[-2] and not _is_rounded_or_name(sides[-2]):
        return gold[: gold.rindex("\\approx")].strip()
    return gold


def _is_rounded_or_name(side: str) -> bool:
    return NAME.fullmatch(side) is not None or re.fullmatch(r"[+-]?[\d.,]+", side) is not None


def _verbal(predicted: str, gold: str) -> bool | None:
    """The verdict if the gold is words, a choice, or a number in a base; None for everything else."""
    if based := _BASED.fullmatch(TEXT.sub(r"\1", gold)):
        other = _BASED.fullmatch(TEXT.sub(r"\1", predicted))
        return other is not None and _digits_and_base(based) == _digits_and_base(other)
    if (label := _CHOICE.fullmatch(gold)) and not _words(gold):  # (B) 5: the letter or the option's text
        answer = _CHOICE.fullmatch(predicted)
        if answer:
            return label[1] == answer[1] and decide(answer[2], label[2]) is True
        return _words(predicted) == label[1] or decide(predicted, label[2])
    gold_words = _words(gold)
    if gold_words is None:
        return None
    if len(gold_words) == 1:
        answer = _CHOICE.fullmatch(predicted)
        if answer and not re.search(r"(?<![A-Za-z\\])\(?[A-H]\)|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])", answer[2]):
            return answer[1] == gold_words
    if shape.EMPTY.fullmatch(gold_words) and shape.shape_of(predicted).kind == "empty":
        return True
    if shape.ALL_REALS.fullmatch(gold_words) and shape.shape_of(predicted).spans == shape.REALS:
        return True
    return _words(predicted) == gold_words


def _digits_and_base(match: re.Match) -> tuple[str, str]:
    return match[1].replace(",", "").lstrip("0").upper(), _BASES.get(match[2].lower(), match[2])


def _values_equal(predicted: str, gold: str, policy: Policy) -> bool | None:
    """Compare two single values: as words, as written numbers, then as formulas by their normal forms."""
    if _squeezed(predicted) == _squeezed(gold):
        return True
    gold_words, words = _words(gold), _words(predicted)
    if gold_words is not None:
        return words == gold_words
    gold_number, number = plain_number(gold), plain_number(predicted)
    if number is not None and gold_number is not None:
        equal = numbers_equal(number, gold_number, policy)
        return equal or (policy.form != "boxed" and _is_long_decimal_of(predicted, number, gold, gold_number, policy))
    if (ratio := _RATIO.fullmatch(gold)) and (other := _RATIO.fullmatch(predicted)):
        parts, expected = ([int(part) for part in text[0].split(":")] for text in (other, ratio))
        if len(parts) != len(expected) or parts == expected:
            return parts == expected
        if 0 in (*parts, *expected) or parts[0] * expected[-1] != parts[-1] * expected[0]:
            return False  # 12:00 is a time; 2:4 against 1:2 stays open
    if gold_number is not None and (words is not None or _never_a_number(predicted)):
        return False
    if _BASED.fullmatch(TEXT.sub(r"\1", predicted)):
        return False
    (left, unit), (right, gold_unit) = (without_unit(_without_currency(text)) for text in (predicted, gold))
    a, b = formula(left), formula(right)
    if a is None or b is None:
        return None
    if not _units_agree(unit or _degrees(left), gold_unit or _degrees(right), policy):
        return False
    equal = formulas_equal(a, b)
    if equal is not True and policy.tolerance:
        x, y = approximate(a.tree), approximate(b.tree)
        if x is not None and y is not None:
            return abs(x - y) <= policy.tolerance * abs(y) or equal
    return equal


def _is_long_decimal_of(one: str, a: PlainNumber, other: str, b: PlainNumber, policy: Policy) -> bool:
    """Whether one number is the other, a fraction without a finite decimal, to at least `LONG_DECIMAL` places."""
    if a.percent != b.percent or not _units_agree(a.unit, b.unit, policy):
        return False
    for text, decimal, exact in ((one, a.value, b.value), (other, b.value, a.value)):
        written = _DECIMALS.match(text)
        places = len(written[1]) if written else 0
        rest = exact.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        if LONG_DECIMAL <= places <= MAX_DIGITS and rest > 1 and decimal * exact > 0:
            gap = (abs(exact) - abs(decimal)) * 10**places
            return -1 < 2 * gap and gap < 1  # rounded or truncated
    return False


def _degrees(text: str) -> str:
    return "degree" if re.search(r"\^\s*\{?\s*\\circ\s*\}?$", text) else ""


def _without_currency(text: str) -> str:
    return re.sub(r"^\s*(?:\\?\$|[€£¥₹])\s*", "", text)


def _stated(predicted: str, gold: str, form: str) -> str | None:
    r"""The statement left in `predicted` after checking its own steps; None if the steps contradict each other.

    `\frac{14}{2} = 7` states 7 and `x = 2\cdot 3 = 6` states x = 6, because the sides are provably equal;
    `\sqrt2 \approx 1.41` states `\sqrt2` (or 1.41 if the gold is a decimal); `4 = 5` states nothing. Form "stated"
    does not check a rounded value after a formula; "lenient" does not check arithmetic before the last `=` either:
    `2 + 3 = 6` states 6 (`8 = 7` contains no arithmetic, `x + 1 = 7` is an equation).
    """
    if "approx" in predicted or "~=" in predicted:
        predicted = _exact_side(predicted, gold, form)
        if predicted is None:
            return None
    sides, operators = relation_sides(predicted)
    if "=" not in operators or set(operators) != {"="} or len(_sides(gold)) >= len(sides) > 1:
        return predicted
    named = NAME.fullmatch(sides[0]) is not None
    values = sides[1:] if named else sides
    if len(values) < 2 or "," in predicted:
        return predicted
    agree = [_values_equal(value, values[-1], DEFAULT) is True for value in values[:-1]]
    if not all(agree) and not (form == "lenient" and _is_arithmetic(values[:-1])):
        return predicted  # left to `_says_more`, which rejects it if the gold is a single value
    return f"{sides[0]} = {values[-1]}" if named else values[-1]


def _is_arithmetic(sides: list[str]) -> bool:
    """Whether no side contains a symbol and at least one is more than a written number."""
    if any(re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])|\\[a-z]*(?:eq|[lg]t|to|arrow)", side) for side in sides):
        return False
    return any(not re.fullmatch(r"[\s\d.,+-]*", side) or re.search(r"\d\s*[+-]\s*\d", side) for side in sides)


def _exact_side(predicted: str, gold: str, form: str) -> str | None:
    sides, operators = relation_sides(predicted)
    if operators.count("~") != 1 or operators[-1] != "~":
        return predicted
    decimal, exact = plain_number(sides[-1]), sides[-2]
    if decimal is None:
        return None
    unchecked = form != "boxed" and bool(exact) and not _is_rounded_or_name(exact)
    head = predicted[: predicted.rindex("\\approx" if "\\approx" in predicted else "~=")].strip()
    if not exact or NAME.fullmatch(exact):
        return f"{exact} = {sides[-1]}" if exact else sides[-1]
    known = formula(exact)
    value = approximate(known.tree) if known else None
    places = len(re.sub(r"[^.\d]", "", sides[-1]).partition(".")[2])
    if value is None or not rounds_to(value, decimal.value, places):
        return head if unchecked else None
    gold_number = plain_number(gold)
    return sides[-1] if gold_number is not None and "." in gold and plain_number(exact) is None else head


def _squeezed(text: str) -> str:
    """`text` without text commands and meaningless spaces; those between digits and letters stay (1 1 is not 11)."""
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)))


def _words(text: str) -> str | None:
    """The folded letters of a verbal answer (`\\text{Monday}`, `(B)`, `yes`); None if it may be a formula."""
    bare = _LABEL.sub("", TEXT.sub(r"\1", text).strip().rstrip("."))
    if choice := re.fullmatch(r"\(?([A-Z])\)?", bare):
        return choice[1]  # a multiple-choice letter; a lower-case variable stays a formula
    if not re.fullmatch(r"[^\W\d_]+(?:[ '’-]+[^\W\d_]+)*", bare):
        return None
    verbal = bare != text or len(bare) >= 4 or bare.lower() in ("yes", "no", "odd", "nan", "inf")
    return re.sub(r"\s+", " ", bare).casefold() if verbal else None


def _says_more(predicted: str, gold: str) -> bool:
    """Whether `predicted` contains more statements than the single value or equation `gold`.

    A symbolic parser takes the last side of `x = 4 = 5` and of `4 = 5`, and one side of `x = 4 \\lor x = 5`.
    """
    if "," in gold or re.search(r"\\(?:pm|mp|begin)(?![A-Za-z])", gold) or _CONNECTIVE.search(gold):
        return False  # several values: their equations may be written out
    sides, expected = _sides(predicted), len(_sides(gold))
    if len(sides) > max(2, expected):
        return True
    if expected > 1:
        return False
    if relation_sides(gold)[1] and expected == 1:
        return False  # an inequality: `x > 1 and x < 2` may be its bounds
    return (len(sides) > 1 and not NAME.fullmatch(sides[0].strip())) or _CONNECTIVE.search(predicted) is not None


def _sides(text: str) -> list[str]:
    """`text` split at every `=` outside braces, but not at `<=`, `>=` or `!=`."""
    depth, cuts = 0, [-1]
    for token in re.finditer(r"\\.|[<>!]=|[{}=]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if token[0] == "=" and depth == 0:
            cuts.append(token.start())
    return [text[start + 1 : end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _never_a_number(text: str) -> bool:
    """Whether a symbolic parser would read `text` as a number that it is not, or not certainly is."""
    if len(sides := _sides(text)) > 1 and not NAME.fullmatch(sides[0].strip()):
        return True  # "4=5" and "x+1=5" would be read as 5
    text = re.sub(r"\\log\s*_\s*(?:\{\s*\w+\s*\}|\w)", r"\\log ", text)
    in_texts = "".join(TEXT.findall(text))
    verbal = re.search(r"\d\s*(?:\\(?:text\w*|mathrm)\s*\{|\s)\s*([A-Za-z][A-Za-z\s./-]*)", text)
    words = re.findall(r"[A-Za-z]+", verbal[1]) if verbal else []
    return bool(
        re.search(r"\d\s+[\d.]", text)  # "2 3" would be added or multiplied
        or re.search(r"[\d)}]\s*_", text)  # "12_8" is a number in base 8
        or re.search(r"\\[lc]?dots|\.\.|\\(?:p?mod|equiv)(?![A-Za-z])", text)  # a rounded value, a residue class
        or (re.search(r"\d", in_texts) and re.search(r"\d", TEXT.sub("", text)))  # 5\text{ feet 6 inches}
        or words[:1] == ["M"]
        or any(word.lower() in NOT_UNITS for word in words)  # 5 million, 5 dozen, 5 feet wrong
    )


def is_readable(gold: str) -> bool:
    """Whether this file can read every part of a reference; otherwise math-verify's parser decides."""
    gold = prepared(gold)
    if _words(gold) is not None or plain_number(gold) is not None or _BASED.fullmatch(gold) or _CHOICE.fullmatch(gold):
        return True
    return _shape_is_readable(shape.shape_of(shape.without_family(gold)))


def _shape_is_readable(of: "shape.Shape") -> bool:
    if of.kind == "value":
        return (
            _words(of.text) is not None
            or plain_number(of.text) is not None
            or is_formula(without_unit(_without_currency(of.text))[0])
        )
    if of.kind == "relation":
        return False
    if of.kind == "equation":
        return all(is_formula(side) for side in relation_sides(of.text)[0])
    return all(_shape_is_readable(item) for item in of.items)


def gold_fault(gold: str) -> str | None:
    """Why `gold` cannot serve as a reference answer; None if it can. Checks only the text, not its algebra."""
    if not gold.strip() or not normalized(gold):
        return "the answer is empty"
    if len(gold) > MAX_ANSWER_CHARS:
        return f"the answer has {len(gold):,} characters, more than {MAX_ANSWER_CHARS:,}"
    if normalized(gold).lower().lstrip("+-") in ("nan", "none", "null", "inf", "n/a"):
        return f"the answer is {gold.strip()!r}"
    depth = 0
    for brace in re.findall(r"\\.|[{}]", gold, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            break
    return f"the answer {gold[:60]!r} has unbalanced braces" if depth else None
