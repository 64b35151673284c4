"""Units and words after a number: which of them name a unit, and which change the number."""

import re

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")

_UNIT_POWER = r"(?:\s*\^\s*\{?\s*[23]\s*\}?|[²³])?"
_UNIT = re.compile(rf"[A-Za-zµ]+\.?{_UNIT_POWER}(?:(?:\s*/\s*|\s+)[A-Za-zµ]+\.?{_UNIT_POWER}){{0,3}}")
_SHORT_UNITS = frozenset(
    "cm mm km nm kg mg lb lbs oz ft yd mi hr hrs min mins sec secs mph kph am pm rs usd eur gbp m g h s l".split()
)
_LETTER_UNITS = frozenset("m g h s l n j w v k c f a b t".split())
# Words after a number that change its value, or start a second number or condition: not units.
NOT_UNITS = frozenset(
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
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SPELLINGS = r"""
dollar $ \$ usd, euro € eur, pound £ gbp lb, yen ¥, rupee ₹ rs, centimeter cm centimetre, millimeter mm,
kilometer km kilometre, meter m metre, kilogram kg, gram g, ounce oz, foot ft feet, mile mi, hour h hr, minute min,
second s sec, liter l litre
"""
_SAME_UNIT = {other: name for name, *others in map(str.split, _SPELLINGS.split(",")) for other in others}
_SAME_UNIT["mph"] = "mile per hour"


def unit_of(rest: str, spaced: bool) -> str | None:
    """The canonical unit that `rest` names; None if it is not a unit (a variable, a second number, a condition)."""
    if re.fullmatch(r"\^\s*\{?\s*\\circ\s*\}?", rest):
        return "degree"
    in_text = rest.startswith("\\")
    words = re.sub(r"\s+", " ", TEXT.sub(r" \1 ", rest)).strip()
    if not _UNIT.fullmatch(words):
        return None
    names = [re.sub(_UNIT_POWER + r"$", "", word).rstrip(".").lower() for word in re.split(r"[ /]+", words)]
    names = [re.sub(r"[\^{}23²³.]", "", name) for name in names if name not in ("", "/")]
    if any(name in NOT_UNITS for name in names) or re.match(r"M\b", words):  # 5 M is not five meters
        return None
    if in_text and any(len(name) == 1 and name not in _LETTER_UNITS for name in names):  # 4\mathrm{i}
        return None
    # One or two bare letters after a number are a variable (5x, 3i) unless they are a unit or inside \text{}.
    if not in_text and any(len(name) < 3 and name not in _SHORT_UNITS and name not in ("per", "a") for name in names):
        return None
    if not in_text and not spaced and len(names) == 1 and len(names[0]) == 1:
        return None
    return unit_name(words)


def unit_name(words: str) -> str:
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


_TRAILING_TEXT = re.compile(
    r"^(.*?\S)\s*(\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{\s*[A-Za-z][^{}]*\}.*)$", re.DOTALL
)
_TRAILING_WORDS = re.compile(
    rf"^(.*[\w)}}\]!])\s+((?:square |cubic |sq\.? |cu\.? )?([A-Za-z]{{2,}}){_UNIT_POWER}(?: per [a-z]+)?)$", re.DOTALL
)
_KNOWN_UNITS = frozenset(
    "unit units inch inches foot feet yard yards mile miles meter meters metre metres centimeter centimeters "
    "millimeter millimeters kilometer kilometers gram grams kilogram kilograms pound pounds ounce ounces liter liters "
    "litre litres gallon gallons second seconds minute minutes hour hours day days week weeks month months year years "
    "degree degrees radian radians rad dollar dollars cent cents euro euros joule joules newton newtons watt watts "
    "volt volts".split()
) | {name for name in _SHORT_UNITS if len(name) > 1}


def without_unit(text: str) -> tuple[str, str]:
    r"""A formula and the unit after it: `2\sqrt3 \text{ cm}` gives `2\sqrt3` and `centimeter`; "" if there is none."""
    if match := _TRAILING_TEXT.match(text):
        unit = unit_of(match[2], True)
        if unit is not None and match[1][-1] not in "+-*/^_=({[,":
            return match[1], unit
    elif (match := _TRAILING_WORDS.match(text)) and match[3].lower() in _KNOWN_UNITS:
        return match[1], unit_name(match[2])
    return text, ""
