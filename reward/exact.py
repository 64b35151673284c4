"""Comparing two answers without sympy: plain numbers by exact fractions, words by their letters, the rest unknown.

Most answers of most runs are plain numbers, and those need no worker process. What this file cannot decide it leaves
to the pool (`None`), with one exception in the other direction: prediction shapes that a lenient symbolic parser would
pay although they are wrong (`4=5` for 5, `12_8` for 12, `5 million` for 5, `2 3` for 5) are refused here.
Nothing here evaluates an expression; digits and exponents are bounded before a number is built.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 4096  # a longer prediction is no answer; a longer gold is a bad row
MAX_DIGITS = 1000
MAX_EXPONENT = 1000  # 10^1000 is a 3,300-bit integer; larger powers are the workers' business

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
_THIN_GROUPS = re.compile("(?<!\\d)\\d{1,3}(?:[\u2009\u202f]\\d{3})+(?!\\d)")  # 10 000 as ISO 80000 sets it
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_SCIENTIFIC = re.compile(
    rf"({_NUMBER})(?:[eE]([+-]?\d{{1,5}})|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{\s*(-?\d{{1,5}})\s*\}}|(\d)))"
)
_TEX_FRACTION = r"\\frac\s*(?:\{\s*([+-]?" + _NUMBER + r")\s*\}\s*\{\s*(" + _NUMBER + r")\s*\}|(\d)\s*(\d))"
_FRACTION = re.compile(rf"{_TEX_FRACTION}|({_NUMBER})\s*/\s*({_NUMBER})")
_MIXED = re.compile(r"(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))|(\d+)\s+(\d+)/(\d+)")
_PLAIN = re.compile(_NUMBER)
_SIGN_AND_CURRENCY = re.compile(r"([+-]?)\s*(\\?\$|[€£¥₹])?\s*([+-]?)\s*")

# What may stand left of "=" in an answer: x, f(x), f^{-1}(x), a_1, \theta, \angle ABC, \text{area}, \vec{v}.
_NAME = re.compile(
    r"(?!\\(?:frac|sqrt|cdot|times|div|pm|sum|int|pi|infty)(?![A-Za-z]))"
    r"(?:\\(?:text|mathrm|mathbf|mathcal|vec|hat|bar|overline|overrightarrow)\s*\{[^{}]*\}|\\?[A-Za-z]+)"
    r"(?:\s+[A-Za-z]+|_\{?\w+\}?|\^\{?-1\}?(?=\s*\()|\([\w, ]*\)|')*"
)
# A second statement or a second value in one answer.
_CONNECTIVE = re.compile(
    r"\\(?:lor|land|vee|wedge|implies|impliedby|iff|therefore|because|(?:[Ll]ong)?(?:[Ll]eft)?[Rr]ightarrow|Leftarrow)"
    r"(?![A-Za-z])|[\u2227\u2228\u2190-\u2194\u21d0-\u21d4\u27f5-\u27fa\u2234\u2235]"
    r"|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
)
_UNIT_POWER = r"(?:\s*\^\s*\{?\s*[23]\s*\}?|[²³])?"
_UNIT = re.compile(rf"[A-Za-zµ]+\.?{_UNIT_POWER}(?:(?:\s*/\s*|\s+)[A-Za-zµ]+\.?{_UNIT_POWER}){{0,3}}")
_SHORT_UNITS = frozenset(
    "cm mm km nm kg mg lb lbs oz ft yd mi hr hrs min mins sec secs mph kph am pm rs usd eur gbp m g h s l".split()
)
# Words after a number that change its value, or that begin a second number or condition: not units.
_NOT_UNITS = frozenset(
    "pi tau sqrt sin cos tan cot csc log ln exp mod modulo infinity inf nan factorial squared cubed plus minus times "
    "over divided percent percentage pct hundred thousand million billion trillion dozen dozens score scores pair "
    "pairs half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth "
    "eighths ninth ninths tenth tenths hundreds thousands millions billions trillions hundredths thousandths gross "
    "fold k b bn mn and or nor not but than then less more fewer greater least most about roughly approximately "
    "to choose remainder base zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety negative "
    "alpha beta gamma delta theta lambda sigma omega phi psi "
    "root roots cube cubes squares inverse inverses reciprocal reciprocals opposite conjugate complement factorials "
    "power powers exponent exponents raised logs logarithm logarithms sum sums difference product "
    "products quotient added subtracted multiplied double doubled triple tripled twice halved "
    "wrong incorrect false error invalid unknown undefined impossible".split()
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SAME_UNIT = {
    "$": "dollar",
    "\\$": "dollar",
    "usd": "dollar",
    "€": "euro",
    "eur": "euro",
    "£": "pound",
    "gbp": "pound",
    "lb": "pound",
    "¥": "yen",
    "₹": "rupee",
    "rs": "rupee",
    "cm": "centimeter",
    "centimetre": "centimeter",
    "mm": "millimeter",
    "km": "kilometer",
    "kilometre": "kilometer",
    "m": "meter",
    "metre": "meter",
    "kg": "kilogram",
    "g": "gram",
    "oz": "ounce",
    "ft": "foot",
    "feet": "foot",
    "mi": "mile",
    "h": "hour",
    "hr": "hour",
    "min": "minute",
    "s": "second",
    "sec": "second",
    "l": "liter",
    "litre": "liter",
    "mph": "mile per hour",
}


@dataclass(frozen=True)
class PlainNumber:
    """A number written out: its exact value, whether a percent sign followed, and the unit ("" for none)."""

    value: Fraction
    percent: bool = False
    unit: str = ""


def normalized(text: str) -> str:
    """The answer without its typography: math delimiters, bold, spacing commands, unicode minus and digits.

    Decimal digits of any script become ASCII (their value is the same); superscripts do not (5² is not 52).
    """
    text = _THIN_GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = text.translate(_CHARACTERS)
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(c)) if unicodedata.category(c) == "Nd" else c for c in text)
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
    text = text.replace("{,}", ",").replace("\\!", "")
    text = re.sub(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", "", text)  # 10\,000 is one number
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"\\(?:[,;: ]|q?quad(?![A-Za-z]))|~", " ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    return text.strip()


def plain_number(text: str) -> PlainNumber | None:
    """The number that a `normalized` text spells out, with sign, currency, percent or unit; None for anything else."""
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
    percent = re.fullmatch(r"\\?%|(?i:percent|pct)", _TEXT.sub(r" \1", rest).strip()) is not None
    if percent or not rest:
        return PlainNumber(value, percent, _unit_name(currency))
    scale, rest = _leading_scale(rest)
    unit = _unit(rest, spaced) if rest else ""
    if unit is None or (unit and currency and unit != _unit_name(currency)):
        return None
    return PlainNumber(value * scale, False, unit or _unit_name(currency))


def _leading_value(text: str) -> tuple[Fraction | None, str]:
    """The unsigned number at the start of `text` in any of its spellings, and what follows it."""
    for pattern, build in ((_MIXED, _mixed), (_SCIENTIFIC, _scientific), (_FRACTION, _fraction), (_PLAIN, _decimal)):
        if match := pattern.match(text):
            rest = text[match.end() :]
            # "12_8", "3/4/5", "1,2" and "5.6.7" go on: the match is only a piece of something else.
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
    """`million` after a number multiplies it; anything else leaves it alone."""
    words = _TEXT.sub(r" \1 ", rest).strip()
    first, _, tail = words.partition(" ")
    scale = _SCALES.get(first.lower(), 1)
    return (scale, tail.strip()) if scale > 1 else (1, rest)


def _unit(rest: str, spaced: bool) -> str | None:
    """The canonical unit that `rest` names, None when it is no unit (a variable, a second number, a condition)."""
    if re.fullmatch(r"\^\s*\{?\s*\\circ\s*\}?", rest):
        return "degree"
    in_text = rest.startswith("\\")
    words = re.sub(r"\s+", " ", _TEXT.sub(r" \1 ", rest)).strip()
    if not _UNIT.fullmatch(words):
        return None
    names = [re.sub(_UNIT_POWER + r"$", "", word).rstrip(".").lower() for word in re.split(r"[ /]+", words)]
    names = [re.sub(r"[\^{}23²³.]", "", name) for name in names if name not in ("", "/")]
    if any(name in _NOT_UNITS for name in names) or re.match(r"M\b", words):  # 5 M is no five meters
        return None
    # A bare letter or two after a number is a variable (5x, 3i) unless it is a unit or stands in \text{}.
    if not in_text and any(len(name) < 3 and name not in _SHORT_UNITS and name not in ("per", "a") for name in names):
        return None
    if not in_text and not spaced and len(names) == 1 and len(names[0]) == 1:
        return None
    return _unit_name(words)


def _unit_name(words: str) -> str:
    words = re.sub(r"[{}\s]*(\^)[{}\s]*", r"\1", words.lower().replace("²", "^2").replace("³", "^3")).strip(" .}")
    names = []
    for word in re.split(r"\s+", words.replace("/", " per ")):
        name, power, exponent = word.partition("^")
        name = name.rstrip(".")
        if name in ("inches", "boxes"):
            name = name[:-2]
        elif len(name) > 2 and name.endswith("s") and not name.endswith("ss"):
            name = name[:-1]
        names.append(_SAME_UNIT.get(name, name) + power + exponent)
    return " ".join(names)


def numbers_equal(predicted: PlainNumber, gold: PlainNumber) -> bool:
    """Exact equality of two written numbers.

    A percent sign on one side only is read both ways (50% equals 50, the answer to "what percent", and 0.5). A unit on
    one side only is ignored; two different units are different answers, they are not converted. No rounding.
    """
    if predicted.unit and gold.unit and predicted.unit != gold.unit:
        return False
    if predicted.percent == gold.percent:
        return predicted.value == gold.value
    with_sign, without = (predicted, gold) if predicted.percent else (gold, predicted)
    return without.value in (with_sign.value, with_sign.value / 100)


def decide(predicted: str | None, gold: str) -> bool | None:
    """Whether the two answers are equal, where that needs no symbolic algebra; None when it does."""
    if predicted is None or not predicted.strip() or len(predicted) > MAX_ANSWER_CHARS:
        return False
    predicted, gold = normalized(predicted), normalized(gold)
    if predicted and _squeezed(_TEXT.sub(r" \1 ", predicted)) == _squeezed(_TEXT.sub(r" \1 ", gold)):
        return True
    if not predicted or not gold:
        return False
    gold_words, words = _words(gold), _words(predicted)
    if gold_words is not None:
        return words == gold_words
    if _says_more(predicted, gold):
        return False
    gold_number = plain_number(_without_name(gold, predicted))
    if gold_number is None:
        return None
    number = plain_number(_without_name(predicted, gold))
    if number is not None:
        return numbers_equal(number, gold_number)
    if words is not None or _never_a_number(predicted):
        return False
    return None


def _squeezed(text: str) -> str:
    """`text` without the spaces that carry no meaning; those between digits and letters stay (1 1 is not 11)."""
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", re.sub(r"\s+", " ", text))


def _words(text: str) -> str | None:
    """The folded letters of a verbal answer (`\\text{Monday}`, `(B)`, `yes`), None when it may be a formula."""
    bare = _TEXT.sub(r"\1", text).strip()
    if choice := re.fullmatch(r"\(?([A-Z])\)?", bare):
        return choice[1]  # a multiple-choice letter; a variable in lower case stays a formula
    if not re.fullmatch(r"[^\W\d_]+(?:[ '’-]+[^\W\d_]+)*", bare):
        return None
    verbal = bare != text or len(bare) >= 4 or bare.lower() in ("yes", "no", "odd", "nan", "inf")
    return re.sub(r"\s+", " ", bare).casefold() if verbal else None


def _without_name(text: str, other: str) -> str:
    """`5` for `x = 5` when the other side gives no name; two different names stay different."""
    if "=" not in other and (match := re.match(r"[A-Za-z]\s*=\s*(?=[^=])", text)):
        return text[match.end() :]
    return text


def _says_more(predicted: str, gold: str) -> bool:
    """True when `predicted` holds more statements than the single value or equation `gold`.

    A symbolic parser takes the last side of `x = 4 = 5` and of `4 = 5`, and one side of `x = 4 \\lor x = 5`.
    """
    if "," in gold or re.search(r"\\(?:pm|mp|begin)(?![A-Za-z])", gold) or _CONNECTIVE.search(gold):
        return False  # several values: their equations may be written out
    sides, expected = _sides(predicted), len(_sides(gold))
    if len(sides) > max(2, expected):
        return True
    if expected > 1:
        return False
    return (len(sides) > 1 and not _NAME.fullmatch(sides[0].strip())) or _CONNECTIVE.search(predicted) is not None


def _sides(text: str) -> list[str]:
    """`text` cut at every `=` outside braces; `<=`, `>=` and `!=` are no cuts."""
    depth, cuts = 0, [-1]
    for token in re.finditer(r"\\.|[<>!]=|[{}=]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if token[0] == "=" and depth == 0:
            cuts.append(token.start())
    return [text[start + 1 : end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _never_a_number(text: str) -> bool:
    """True for shapes that a symbolic parser reads as a number they are not, or not for certain."""
    if "=" in text and not _NAME.fullmatch(text.partition("=")[0].strip()):
        return True  # "4=5" and "x+1=5" would be read as 5
    in_texts = "".join(_TEXT.findall(text))
    verbal = re.search(r"\d\s*(?:\\(?:text\w*|mathrm)\s*\{|\s)\s*([A-Za-z][A-Za-z\s./-]*)", text)
    words = re.findall(r"[A-Za-z]+", verbal[1]) if verbal else []
    return bool(
        re.search(r"\d\s+[\d.]", text)  # "2 3" would be added or multiplied
        or re.search(r"[\d)}]\s*_", text)  # "12_8" is a number in base 8
        or re.search(r"\\[lc]?dots|\.\.|\\(?:p?mod|equiv)(?![A-Za-z])", text)  # a rounded value, a residue class
        or (re.search(r"\d", in_texts) and re.search(r"\d", _TEXT.sub("", text)))  # 5\text{ feet 6 inches}
        or words[:1] == ["M"]
        or any(word.lower() in _NOT_UNITS for word in words)  # 5 million, 5 dozen, 5 feet wrong
    )


def gold_problem(gold: str) -> str | None:
    """Why `gold` cannot serve as a reference answer, None when it can. Looks at the text alone, not at its algebra."""
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
