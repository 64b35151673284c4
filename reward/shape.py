r"""The shape of an answer (value, list, set, tuple, interval, matrix, relation), and comparison of shapes by parts.

Parts are compared by the caller's `leaf(predicted, gold) -> bool | None`: exact arithmetic alone in the calling
process, backed by math-verify in a worker. A None without any False makes the whole None.

Policy: a bare list `1, 2` equals the set `{1, 2}` and, in its order, the tuple `(1, 2)`; a set is not a tuple. Order
counts in tuples, matrices and `[a, b, c]`, in bare lists by option. `\pm` stands for its two values. `x > 3` is the
interval `(3, \infty)`; an open `(a, b)` without infinity may be a point, so an inequality does not answer it. `x = 5`
answers 5.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from reward.algebra import Algebra, formula, negated
from reward.formula import Unread
from reward.values import approximate, is_settled

Leaf = Callable[[str, str], bool | None]
MAX_PARTS = 64

# Names allowed left of "=" in an answer: x, f(x), f^{-1}(x), a_1, \theta, \angle ABC, \text{area}, \vec{v}.
_NAME = (
    r"(?!\\(?:frac|sqrt|cdot|times|div|pm|sum|int|pi|infty)(?![A-Za-z]))"
    r"(?:\\(?:text|mathrm|mathbf|mathcal|vec|hat|bar|overline|overrightarrow)\s*\{[^{}]*\}|\\?[A-Za-z]+|\|[A-Z]{2}\|)"
    r"(?:\s+[A-Za-z]+|_\{?\w+\}?|\^\{?-1\}?(?=\s*\()|\([\w, ]*\)|')*"
)
# Also their ratios: V_1:V_2, \frac{AB}{CD}, AB/CD (x/y is a formula).
NAME = re.compile(
    rf"{_NAME}(?:\s*:\s*{_NAME})?|\\frac\s*\{{[A-Z]{{2}}(?:_\d)?\}}\s*\{{[A-Z]{{2}}(?:_\d)?\}}|[A-Z]{{2}}\s*/\s*[A-Z]{{2}}"
)
_OPERATORS = {
    "<": r"<|\\lt(?![A-Za-z])",
    "<=": r"<=|\\leq?(?:slant)?(?![A-Za-z])",
    ">": r">|\\gt(?![A-Za-z])",
    ">=": r">=|\\geq?(?:slant)?(?![A-Za-z])",
    "!=": r"!=|\\neq?(?![A-Za-z])|\\not\s*=",
    "in": r"\\in(?![A-Za-z])",
    "~": r"\\approx(?![A-Za-z])|~=",
    "=": r"=",
}
_OPERATOR = re.compile("|".join(f"(?P<o{i}>{p})" for i, p in sorted(enumerate(_OPERATORS.values()), reverse=True)))
_VARIABLE = re.compile(r"\\?[A-Za-z](?:_\{?\w+\}?)?|[a-zA-Z]\([a-z]\)")
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_OPEN, _CLOSE = {"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"}, {")", "]", "}", "\\}", "\\rangle"}
_CLOSE |= {"\\rfloor", "\\rceil"}
_PIECE = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|\\(?:langle|rangle|lfloor|rfloor|lceil|rceil|cup)(?![A-Za-z])"
    r"|\\(?:begin|end)\{[a-z]*\}|\\.|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|(?<=[\d)])or(?=[A-Z]|[a-z]\s*[=(_])|[()\[\]{},;]",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_INFINITE = re.compile(r"([+-]?)\s*(?:\\infty|\\infin|infinity|infty|oo|inf)")
_MATRIX = re.compile(r"\\begin\{([pbB]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
ALL_REALS = re.compile(
    r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*R\s*\}?|\\R|\(-\\infty,\s*\+?\\infty\)"
    r"|(?:the set of )?(?:all )?reals?(?: numbers?)?"
)
REALS = (("-\\infty", "\\infty", True, True),)
EMPTY = re.compile(r"\\(?:emptyset|varnothing)|\\\{\s*\\\}|(?:the )?empty set")
_SAID = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*([^{}]*?)\s*\}")
_SET_BUILDER = re.compile(r"\\\{\s*([a-z])(?:\s*\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?\s*(?:\\mid|:|\|)(.*)\\\}", re.DOTALL)
_WITHOUT = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?\s*(?:\\setminus|\\backslash|-)\s*\\\{(.*)\\\}", re.DOTALL)
_NAMES = re.compile(r"\(\s*\\?[A-Za-z]+(?:\s*,\s*\\?[A-Za-z]+)+\s*\)")
_FAMILY = re.compile(
    r"(?:,|;|\\quad|\s)\s*(?:\(|\\text\s*\{[^{}]*\}|where|for|with)?\s*([a-z])\s*\\in\s*(?:\\mathbb\s*\{?\s*[ZN]\s*\}?|[ZN])\)?$"
)


@dataclass(frozen=True)
class Shape:
    """`kind` is value, list, set, tuple, brackets, spans (a union of intervals), matrix, equation, relation, empty.

    `items` are the parts; `spans` holds (low, high, low_open, high_open) tuples. `name` is the left side of "=".
    """

    kind: str
    text: str = ""
    items: tuple["Shape", ...] = ()
    spans: tuple[tuple[str, str, bool, bool], ...] = ()
    name: str = ""
    certain: bool = True  # False for spans that may be a point: (1, 2)
    unordered: bool = False  # a list that came from \pm or a word: never ordered


def compare(predicted: str, gold: str, leaf: Leaf, ordered: bool = False, several: str = "all") -> bool | None:
    """Whether two normalized answers have equal shapes with equal parts; None if a part stays open."""
    p, g = shape_of(without_family(predicted)), shape_of(without_family(gold))
    if several == "any" and g.kind in ("list", "set") and p.kind == "value":
        return _any(_equal(p, item, leaf, ordered) for item in g.items)
    return _equal(p, g, leaf, ordered)


def without_family(text: str) -> str:
    r"""`k\pi, k \in \mathbb{Z}` without the trailing condition."""
    return _FAMILY.sub("", text).strip() if "\\in" in text else text


def split(text: str, separators: Iterable[str], inside: bool = False) -> list[str]:
    """`text` split at separators outside brackets, or whole if the brackets do not balance.

    Brackets of different kinds may close each other, as in [0, 1). A comma before three digits belongs to a number;
    `inside` brackets, only if other commas are followed by a space: (1,234) is a pair.
    """
    separators, depth, parts, start = set(separators), 0, [], 0
    spaced = "," in separators and (not inside or re.search(r",\s", text))
    skip = {m.start() + i for m in _THOUSANDS.finditer(text) for i, c in enumerate(m[0]) if c == ","} if spaced else ()
    for match in _PIECE.finditer(text):
        token = match[0]
        if token in _OPEN or token.startswith("\\begin"):
            depth += 1
        elif token in _CLOSE or token.startswith("\\end"):
            depth -= 1
        elif depth == 0:
            word = re.sub(r"\\(?:text|mathrm|mbox)|[{}\s,]", "", token) if len(token) > 1 else token
            if word in separators and match.start() not in skip:
                parts.append(text[start : match.start()])
                start = match.end()
    parts.append(text[start:])
    return [part.strip() for part in parts] if depth == 0 else [text]


def shape_of(text: str) -> Shape:
    """The shape of a normalized answer in LaTeX notation."""
    text = text.strip()
    if reversed_interval := re.fullmatch(r"([\][])([^\[\],]*),([^\[\],]*)([\][])", text):
        left, low, high, right = reversed_interval.groups()
        if (left, right) != ("[", "]"):  # ]0, 1[ is (0, 1)
            return _span(low, high, left == "]", right == "[", True)
    said = _SAID.sub(r"\1", text)
    if EMPTY.fullmatch(said):
        return Shape("empty")
    if ALL_REALS.fullmatch(said):
        return Shape("spans", text, spans=REALS)
    if built := _SET_BUILDER.fullmatch(text):
        condition = shape_of(built[2])
        return condition if condition.kind == "spans" and condition.name == built[1] else Shape("relation", text)
    if without := _WITHOUT.fullmatch(text):
        return _reals_without(split(without[1], (",", ";"))) or Shape("value", text)
    if (groups := _named_groups(text)) is not None:
        return Shape("list", text, groups)
    parts = split(text, (",", ";", "and", "or"))
    parts = [part for part in parts if part] if len(parts) > 2 else parts
    if len(parts) > 1 and all(parts) and len(parts) <= MAX_PARTS:
        return _list(parts, text)
    related = _relation(text)
    if related is not None:
        return related
    pieces = split(text, ("\\cup", "cup", "U"))
    if len(pieces) > 1 and all(pieces):
        shapes = [shape_of(piece) for piece in pieces]
        if all(shape.kind == "spans" or (shape.kind == "tuple" and shape.spans) for shape in shapes):
            return Shape("spans", text, spans=tuple(span for shape in shapes for span in shape.spans))
    return _bracketed(text) or _plus_minus(text) or Shape("value", text)


def _named_groups(text: str) -> tuple[Shape, ...] | None:
    """`p=5, q=2; p=7, q=2` as tuples in the order of their names."""
    parts = [part.strip(" ,") for part in split(text, (";", "and", "or"))] if text.count("=") >= 4 else []
    if not 2 <= len(parts) <= MAX_PARTS:
        return None
    groups = []
    for part in parts:
        items = [shape_of(item) for item in split(part, (",",)) if item]
        if len(items) < 2 or not all(item.name and item.kind == "value" for item in items):
            return None
        groups.append(Shape("tuple", part, tuple(sorted(items, key=lambda item: item.name))))
    return tuple(groups) if len({tuple(item.name for item in group.items) for group in groups}) == 1 else None


def _list(parts: list[str], text: str) -> Shape:
    items = tuple(shape_of(part) for part in parts)
    if all(item.kind == "spans" for item in items) and len(split(text, (",", ";"))) == 1:  # x < 1 or x > 2
        if len({item.name for item in items}) == 1:
            if len(split(text, ("or",))) == 1:  # x > -3 and x < 2
                return _both(items) or Shape("list", text, items)
            return Shape("spans", text, spans=tuple(s for item in items for s in item.spans), name=items[0].name)
    flat, name = _flat(items), ""
    names = {item.name for item in flat if item.name}
    if len(names) == 1 and flat[0].name and not flat[0].kind == "equation":  # x = 1, 2 and x = 1, x = 2
        flat, name = tuple(replace(item, name="") for item in flat), names.pop()
    return Shape("list", text, flat, name=name, unordered=any(item.unordered for item in items))


def _flat(items: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple(inner for item in items for inner in (item.items if item.kind == "list" else (item,)))


def _both(items: tuple[Shape, ...]) -> Shape | None:
    """The interval in which a lower and an upper bound both hold."""
    spans = [item.spans[0] for item in items if len(item.spans) == 1]
    lower = [span for span in spans if _INFINITE.fullmatch(span[1]) and not _INFINITE.fullmatch(span[0])]
    upper = [span for span in spans if _INFINITE.fullmatch(span[0]) and not _INFINITE.fullmatch(span[1])]
    if len(items) != 2 or len(lower) != 1 or len(upper) != 1 or not items[0].name:
        return None
    return _span(lower[0][0], upper[0][1], lower[0][2], upper[0][3], True, items[0].name)


def _reals_without(points: list[str]) -> Shape | None:
    """The real numbers without some points, as the intervals between them."""
    known = [formula(point) for point in points]
    values = [approximate(one.tree) if one else None for one in known]
    if None in values or len(set(values)) < len(values):
        return None
    ends = ["-\\infty", *(point for _, point in sorted(zip(values, points, strict=True))), "\\infty"]
    spans = tuple((low, high, True, True) for low, high in itertools.pairwise(ends))
    return Shape("spans", spans=spans)


def _bracketed(text: str) -> Shape | None:
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in re.split(r"\\cr(?![A-Za-z])|\\\\", matrix[2]) if row.strip()]
        cells = [[cell.strip() for cell in row.split("&")] for row in rows]
        if not cells or any(len(row) != len(cells[0]) for row in cells) or "\\begin" in matrix[2]:
            return None
        lines = tuple(Shape("row", items=tuple(Shape("value", cell) for cell in row)) for row in cells)
        return Shape("matrix", text, lines)
    for left, right, kind in (("\\{", "\\}", "set"), ("\\langle", "\\rangle", "tuple")):
        if text.startswith(left) and text.endswith(right) and _is_one(text):
            inner = text[len(left) : -len(right)]
            items = tuple(shape_of(part) for part in split(inner, (",", ";"), inside=True) if part)
            items = _flat(items)
            return Shape(kind, text, items) if items and len(items) <= MAX_PARTS else None
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _is_one(text):
        parts = split(text[1:-1], (",", ";"), inside=True)
        if len(parts) < 2 or not all(parts) or len(parts) > MAX_PARTS:
            return None
        shapes = tuple(shape_of(part) for part in parts)
        if len(parts) == 2:
            certain = text[0] + text[-1] != "()" or any(_INFINITE.fullmatch(part) for part in parts)
            span = _span(parts[0], parts[1], text[0] == "(", text[-1] == ")", certain)
            return span if certain else Shape("tuple", text, shapes, span.spans, certain=False)
        if text[0] + text[-1] in ("()", "[]"):
            return Shape("tuple" if text[0] == "(" else "brackets", text, shapes)
    return None


def _is_one(text: str) -> bool:
    """Whether the opening bracket of `text` closes at its end, unlike in (1)(2)."""
    depth = 0
    for match in _PIECE.finditer(text):
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
        if depth == 0 and match[0] in _CLOSE:
            return match.end() == len(text)
    return False


def _span(low: str, high: str, low_open: bool, high_open: bool, certain: bool, name: str = "") -> Shape:
    return Shape("spans", spans=((low.strip(), high.strip(), low_open, high_open),), certain=certain, name=name)


def _plus_minus(text: str) -> Shape | None:
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])|\+/?-", text):
        return None
    text = re.sub(r"\+/?-", r"\\pm ", text)
    both = []
    for plus, minus in (("+", "-"), ("-", "+")):
        signed = re.sub(r"\\pm(?![A-Za-z])", plus, text)
        both.append(re.sub(r"\\mp(?![A-Za-z])", minus, signed).strip().removeprefix("+").strip())
    return Shape("list", text, tuple(shape_of(one) for one in both), unordered=True)


def _relation(text: str) -> Shape | None:
    """A named value, an equation, or an inequality in one variable as intervals; None without an operator."""
    sides, operators = relation_sides(text)
    if not operators or not all(sides):
        return None
    if set(operators) == {"="}:
        if NAME.fullmatch(sides[0]) and len(sides) == 2:
            return replace(shape_of(sides[1]), name=squeezed_name(sides[0]))
        if len(sides) == 2 and _NAMES.fullmatch(sides[0]):  # (x, y) = (1, 2)
            return shape_of(sides[1])
        return Shape("equation", text)
    if operators == ["in"] and NAME.fullmatch(sides[0]):
        value = shape_of(sides[1])
        if value.kind == "spans" or value.spans:
            return Shape("spans", spans=value.spans, name=squeezed_name(sides[0]), certain=value.certain)
        return replace(value, name=squeezed_name(sides[0])) if value.kind == "set" else Shape("relation", text)
    return _solved(sides, operators) or Shape("relation", text)


def _solved(sides: list[str], operators: list[str]) -> Shape | None:
    """Solve `x > a`, `a < x <= b` or `x != a` for a bare variable."""
    if len(sides) == 2 and operators[0] in ("<", "<=", ">", ">=", "!="):
        left, right, operator = sides[0], sides[1], operators[0]
        if not _VARIABLE.fullmatch(left):
            left, right = right, left
            operator = _FLIPPED.get(operator, operator)
        if not _VARIABLE.fullmatch(left) or _VARIABLE.fullmatch(right):
            return None
        name, is_open = squeezed_name(left), operator in ("<", ">")
        if operator == "!=":
            spans = (("-\\infty", right, True, True), (right, "\\infty", True, True))
            return Shape("spans", spans=spans, name=name)
        if operator[0] == ">":
            return _span(right, "\\infty", is_open, True, True, name)
        return _span("-\\infty", right, True, is_open, True, name)
    if len(sides) == 3 and _VARIABLE.fullmatch(sides[1]):
        if {*operators} <= {">", ">="}:  # b >= x > a is a < x <= b
            sides, operators = sides[::-1], [_FLIPPED[operator] for operator in reversed(operators)]
        if {*operators} <= {"<", "<="}:
            low_open, high_open = (operator == "<" for operator in operators)
            return _span(sides[0], sides[2], low_open, high_open, True, squeezed_name(sides[1]))
    return None


def relation_sides(text: str) -> tuple[list[str], list[str]]:
    """The sides and operators of a chain of relations, split outside brackets."""
    depth_at, depth = {}, 0
    for match in _PIECE.finditer(text):
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
        depth_at[match.start()] = depth
    positions = sorted(depth_at)
    sides, operators, start, index, level = [], [], 0, 0, 0
    for match in _OPERATOR.finditer(text):
        while index < len(positions) and positions[index] < match.start():
            level = depth_at[positions[index]]
            index += 1
        if level == 0 and match.start() >= start:
            sides.append(text[start : match.start()].strip())
            operators.append(list(_OPERATORS)[int(match.lastgroup[1:])])
            start = match.end()
    return [*sides, text[start:].strip()], operators


def squeezed_name(name: str) -> str:
    r"""A name without typography: `\text{Area}` and `Area`, `a_{1}` and `a_1`, `f(x)` and `f(n)` become the same."""
    name = re.sub(r"(?<=[A-Za-z])\([a-z]\)$", "()", name.strip())
    name = re.sub(r"\\(?:text|mathrm|mathbf|vec|hat|bar|overline|overrightarrow)(?![A-Za-z])", "", name)
    return re.sub(r"[\s{}]", "", name)


def _equal(p: Shape, g: Shape, leaf: Leaf, ordered: bool) -> bool | None:
    if p.name and g.name and p.name != g.name:  # y = 1/x and xy = 1 are one equation, x = 5 and y = 5 are not
        return p.kind == g.kind == "value" and _relations_equal(p, g) is True
    if p.kind in ("relation", "equation") or g.kind in ("relation", "equation"):
        return _relations_equal(p, g)
    if g.kind == "empty" or p.kind == "empty":
        return p.kind == g.kind
    if p.kind == "spans" or g.kind == "spans":
        return _spans_equal(p, g, leaf)
    if p.kind == "matrix" or g.kind == "matrix":
        if p.kind != g.kind or len(p.items) != len(g.items):
            return None if "value" in (p.kind, g.kind) else False
        return _every(_in_order(a.items, b.items, leaf, ordered) for a, b in zip(p.items, g.items, strict=True))
    if p.kind == g.kind == "value":
        return leaf(p.text, g.text)
    if {p.kind, g.kind} == {"set", "value"} and len(p.items or g.items) == 1:  # the solution set {5} and 5
        return _equal(*((p.items[0], g) if p.items else (p, g.items[0])), leaf, ordered)
    if "value" in (p.kind, g.kind):
        return _value_against_many(p, g)
    kinds = {p.kind, g.kind}
    if kinds in ({"set"}, {"list", "set"}) or (kinds == {"list"} and (not ordered or g.unordered or p.unordered)):
        points = all(item.kind == "tuple" for item in (*p.items, *g.items))  # a solution given twice counts once
        return _as_sets(p, g, leaf, ordered, distinct=points or kinds != {"list"})
    if kinds <= {"tuple", "list"} or kinds <= {"brackets", "list"}:
        return _in_order(p.items, g.items, leaf, ordered)
    return False


def _value_against_many(p: Shape, g: Shape) -> bool | None:
    """One value never answers several, nor several one; a value that cannot be parsed may still be several."""
    value = p if p.kind == "value" else g
    return False if formula(value.text) is not None or re.fullmatch(r"[\w\s.]*", value.text) else None


def _every(verdicts: Iterable[bool | None]) -> bool | None:
    undecided = False
    for verdict in verdicts:
        if verdict is False:
            return False
        undecided = undecided or verdict is None
    return None if undecided else True


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    verdicts = list(verdicts)
    return True if True in verdicts else None if None in verdicts else False


def _in_order(p: tuple[Shape, ...], g: tuple[Shape, ...], leaf: Leaf, ordered: bool) -> bool | None:
    if len(p) != len(g):
        return False
    names_p, names_g = [s.name for s in p], [s.name for s in g]
    if any(names_p) != any(names_g):  # (1, 2) for x = 1, y = 2: in alphabetical order
        names = names_p if any(names_p) else names_g
        as_written = any(names_g) and len(set(names_g)) == len(names_g)
        if not all(names) or (sorted(set(names)) != names and not as_written):
            return False
    return _every(_equal(a, b, leaf, ordered) for a, b in zip(p, g, strict=True))


def _as_sets(p: Shape, g: Shape, leaf: Leaf, ordered: bool, distinct: bool) -> bool | None:
    """Match the items one-to-one; in sets, items that are certainly equal count once."""
    if any(s.name for s in p.items) != any(s.name for s in g.items):
        return _in_order(p.items, g.items, leaf, ordered)
    left, right = list(p.items), list(g.items)
    if distinct:
        left, right = _distinct(left, leaf, ordered), _distinct(right, leaf, ordered)
    if len(left) != len(right):
        return False
    undecided = False
    for item in right:
        verdicts = [_equal(candidate, item, leaf, ordered) for candidate in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None not in verdicts:
            return False
        else:
            undecided = True
    return None if undecided else True


def _distinct(items: list[Shape], leaf: Leaf, ordered: bool) -> list[Shape]:
    kept: list[Shape] = []
    for item in items:
        if not any(item.text == other.text or _equal(item, other, leaf, ordered) is True for other in kept):
            kept.append(item)
    return kept


def _spans_equal(p: Shape, g: Shape, leaf: Leaf) -> bool | None:
    if not p.spans or not g.spans:
        return False if {p.kind, g.kind} & {"list", "set", "tuple", "brackets", "value"} else None
    if not g.certain and p.certain and p.name:
        return False  # (1, 2) may be a point: 1 < x < 2 does not answer it
    left, right = _sorted_spans(p.spans), _sorted_spans(g.spans)
    if len(left) != len(right):
        return None if len(p.spans) + len(g.spans) > 2 else False
    return _every(_span_equal(a, b, leaf) for a, b in zip(left, right, strict=True))


def _span_equal(a: tuple, b: tuple, leaf: Leaf) -> bool | None:
    for low_or_high in (0, 1):
        x, y = _INFINITE.fullmatch(a[low_or_high]), _INFINITE.fullmatch(b[low_or_high])
        if bool(x) != bool(y) or (x and (x[1] == "-") != (y[1] == "-")):
            return False
        if not x and a[2 + low_or_high] != b[2 + low_or_high]:
            return False
    ends = [(a[i], b[i]) for i in (0, 1) if not _INFINITE.fullmatch(a[i])]
    return _every(leaf(x, y) for x, y in ends)


def _sorted_spans(spans: tuple) -> list:
    keys = []
    for span in spans:
        infinite = _INFINITE.fullmatch(span[0])
        known = formula(span[0])
        low = float("-inf") if infinite else approximate(known.tree) if known else None
        keys.append(low)
    if any(key is None for key in keys):
        return list(spans)
    return [span for _, span in sorted(zip(keys, spans, strict=True), key=lambda pair: pair[0])]


def _relations_equal(p: Shape, g: Shape) -> bool | None:
    """Whether one equation is a multiple of the other; None if the two may still mean the same."""
    for one, other in ((p, g), (g, p)):
        if one.kind == "equation" and other.kind != "equation" and not other.name:
            return False  # x + 1 = 5 does not answer 5, nor 5 the equation
        if one.kind == "relation" and other.kind == "value" and not other.name and formula(other.text):
            return False
    left, right = _difference(p), _difference(g)
    if not left or not right or set(left) == {()} or set(right) == {()}:  # x = x + 1 holds nowhere
        return None if left is None or right is None else False
    if set(left) == set(right):
        first = next(iter(left))
        factor = left[first] / right[first]
        if all(left[m] == factor * right[m] for m in left):
            return True
    return False if is_settled(left) and is_settled(right) else None


def _difference(shape: Shape) -> dict | None:
    """Left minus right side of an equation, times its denominators, as a polynomial; None if it has no such form."""
    if shape.kind == "equation":
        sides, operators = relation_sides(shape.text)
        if operators != ["="]:
            return None
    elif shape.kind == "value" and shape.name:
        sides = [shape.name, shape.text]
    else:
        return None
    forms = [formula(side) for side in sides]
    if any(form is None or form.form is None for form in forms):
        return None
    a, b = (form.form for form in forms)
    try:
        return Algebra().add(a, negated(b)).num
    except Unread:
        return None
