r"""The answer that a text states: in its boxes, after "the answer is" or `####`, or as its last formula or number.

`stated_answer` reads a box or an explicit statement; `lenient_answer` also reads the last formula or number. Both read
only the text after the last `</think>`, take the last of several statements, and find no answer if the text retracts
it ("The answer is 7. No, 8."). The result may hold several values ("7 or 8"): the comparison judges them together.
Everything but the boxes is looked for in the last 8,000 characters, in time linear in their number.
"""

import re
from dataclasses import dataclass

from reward.answer import box_spans, last_match, tag_content
from reward.shape import split
from reward.units import NOT_UNITS, SCALES, TEXT, unit_of

TAIL = 8000
SENTENCE = 600  # characters of a statement that are read
MOST_WORDS = 6  # of an answer in plain words
MOST_BOXES = 64

_MARKER = re.compile(r"<\|[a-z_]*\|>|</s>|<(?:start|end)_of_turn>")
_OVERESCAPED = re.compile(r"\\\\boxed(?![A-Za-z])")
_ANCHOR = re.compile(
    r"(?:(?<![A-Za-z])(?:answers?|solutions?|results?|r[ée]ponse|respuesta|antwort)\b"
    r"(?:\s+(?:to|of|for|in)\s[^.\n:=$]{0,80}?)?[\s*_}]*"
    r"(?:(?P<denied>(?:is|are)(?:n['’]t|[ \t]+not)\b|can(?:no|['’])t be\b)"
    r"|(?:is|are|would be|will be|should be|must be|est|es|ist)\b[ \t]*:?|[:=])"
    r"|答案(?:是|为|：|:))",
    re.IGNORECASE,
)
_UP_TO_THE_NEXT = re.compile(
    r"(?:[\s,;]+(?:and|so|but|thus|then))?[\s,;]*(?:(?:the|my|our)\s+)?(?:(?:final|correct|right)\s+)?$", re.IGNORECASE
)
_HASH = re.compile(r"(?<!#)####(?!#)(?=[ \t]*[-+\u2212]?[ \t]*[\d.$€£¥₹\\(])")
_LEAD = re.compile(
    r"(?:(?:simply|just|exactly|therefore|thus|then|indeed|clearly|definitely|certainly|surely|obviously|for sure|that"
    r"|given by|equal to|as follows|the following|option|choice)\b\s*:?\s*)+",
    re.IGNORECASE,
)
_NOUNS = re.compile(
    r"(?:(?:the|a|an|all|ordered|pair|pairs|triple|tuple|point|points|set|sets|interval|intervals|matrix|vector|number"
    r"|value|values|expression|polynomial|function|equation|line|fraction|integer|integers|inequality|solution)\s*)+"
    r"(?:of\s+)?",
    re.IGNORECASE,
)
_COPULA = re.compile(r"(?<![A-Za-z])(?:is|are|equals|is equal to|becomes|remains)(?![A-Za-z])\s*:?")
_NEGATED = re.compile(r"n['’]t\b|\b(?:not|never|neither|nor|if|unless|whether|either|cannot)\b", re.IGNORECASE)
_CLAUSE = re.compile(
    r",\s*(?:which|where|because|since|as|so|it|that|when|with|and so)\b|[,;]?\s+\b(?:because|since|which|where)\b"
    r"|\s+[-–—]+\s+(?=[A-Za-z])|(?<=[\w)}$]),?\s+(?:not|non|rather than|instead of)\s+(?=\S)",
    re.IGNORECASE,
)
_JOINED = re.compile(r"\s*(?:,|;|&|(?:,\s*)?(?:and|or)|\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\})?\s*")
_JOINS = re.compile(r"[\s,;:]*(?:,|;|&|\band\b|\bor\b)\s*(?:\\?[A-Za-z](?:_\{?\w+\}?)?\s*=)?\s*|\s*")
_NO_JOIN = re.compile(
    r"\b(?:no|not|wait|but|thus|so|then|therefore|hence|rather|actually|instead|since|because|is|are|gives?|which|if"
    r"|wrong|incorrect|correction|check|first|finally|get|have|becomes|again)\b",
    re.IGNORECASE,
)
_RETRACTS = re.compile(
    r"[\s.!?,;:*_\"'’”)\]$-]*(?:or|either|maybe|perhaps|possibly|probably not|alternatively|no|nope|wait|actually|hmm"
    r"|sorry|oops|correction|scratch that|not|but (?:it|maybe|perhaps|no|not|actually|wait)|i mean"
    r"|(?:which|this|that|it) (?:is|was|seems|looks) (?:wrong|incorrect|not|false|a mistake)"
    r"|(?:this|that|it) (?:isn|wasn|can)['’]t)\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"n['’]t\b|\b(?:not|never|neither|nor|or|either|between|than|least|most|about|approximately|around|roughly|nearly"
    r"|maybe|perhaps|possibly|might|could|except|without|wrong|incorrect|false|versus|vs|until|if|unless|guess|step"
    r"|case|equation|part|figure|page|section|line|example|problem|question|method)\b",
    re.IGNORECASE,
)
_WRONG = re.compile(r"\b(?:wrong|incorrect|false|mistaken?)\b", re.IGNORECASE)
_REFUTED = re.compile(r"n['’]t\b|\b(?:not|wrong|incorrect|false|or|but|maybe|perhaps|unless|mistake)\b", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.,\\])(?:(?<![)\]}])[-\u2212])?\\?[$€£]?"
    r"(?:\\frac\{\d+\}\{\d+\}|(?:\d{1,3}(?:[,\u2009\u202f]\d{3})+(?!\d)|\d+)(?:[.,]\d+)?(?:\s?/\s?\d+)?(?::\d+)*|\.\d+)"
)
_CJK_NUMBER = re.compile(r"(?<=[^\x00-\x7f])" + _NUMBER.pattern.partition(")")[2])
_GLUED_UNIT = re.compile(r"(?:[kcm]?m[²³]|[€£$%°]|\\?%|\\\$|(?:cm|km|kg|mm|ft|mph)(?![A-Za-z0-9]))")
_DELIMITER = re.compile(r"\\\\|\\\$|\$\$|\$|\\[()\[\]]|\n")
_PROSE = re.compile(r"[A-Za-z]{3,}\s+[A-Za-z]{2,}|[.:;,]\s+[A-Z][a-z]")
_SYMBOL = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?")
_CHOICE = re.compile(r"(?<![\w'’(])\(?([A-H])\)?(?![\w'’-])(?!\s+[a-z]+\s+[a-z])")
_SPEAKS = re.compile(
    r"\b(?:is|are|was|so|thus|therefore|hence|gives?|get|have|has|because|since|find|equals|means|we|it|when|there"
    r"|then|this|that|with|here)\b",
    re.IGNORECASE,
)
_FOREIGN = re.compile(r"[\u0590-\u1fff\u3040-\u9fff\uac00-\ud7af]")
_LABEL = re.compile(r"\s*[A-Za-z][A-Za-z ]{2,40}:\s|\s*[Aa]nswer\s")


Span = tuple[int, int, str | None]  # start, end and content of a formula


@dataclass(frozen=True)
class Statement:
    """The answer that a text states (None if the text retracts it), and its position."""

    answer: str | None
    start: int
    denied: str = ""  # what the answer is said not to be, if nothing else is stated


def stated_answer(text: str) -> str | None:
    """The last answer that `text` states: a box (several if they belong together), a sentence, or `#### n`."""
    found = _stated(visible(text))
    return found.answer if found else None


def lenient_answer(text: str) -> str | None:
    """`stated_answer`; without one, the whole text if it is an answer, else its last formula or number."""
    text = visible(text)
    found = _stated(text)
    if found is not None or "\\boxed" in text:  # a box that never closes
        return found.answer if found else None
    tail = text[-TAIL:].strip()
    anchor = last_match(_ANCHOR, tail)
    if anchor is not None:
        sentence = tail[anchor.end() :].lstrip(" \t\n*_:\"'")
        end = _sentence_end(_masked(sentence, _formulas(sentence)))
        if _RETRACTS.match(sentence, end):
            return None
        answer = _last_value(sentence[:end])
        if answer is not None:
            return answer
    if _is_bare(tail):
        return _formula_answer(tail) or tail or None
    return _last_value(tail)


def reference_answer(gold: str) -> str:
    """The answer in a reference that may be a worked solution or a sentence."""
    text = gold if "\\begin" in gold else re.sub(r"\\\\(?=[A-Za-z])", r"\\", gold)
    if "\\boxed" in text:
        boxes = _joined_boxes(text)
        if boxes is not None:
            return boxes.answer or gold
        start = text.rfind("\\boxed{")
        return text[start + 7 :].strip() or gold if start >= 0 else gold
    anchor = last_match(_ANCHOR, text[-TAIL:])
    if anchor is not None or _HASH.search(text):
        answer = stated_answer(text)
        # "The solution is acidic." is compared as is.
        return answer if answer and re.search(r"[\d\\]|^\(?[A-H]\)?\b", answer) else gold
    text = text.strip()[-TAIL:]
    if not _formulas(text):
        return gold
    joined = _formula_answer(text)
    if joined is not None:
        return joined
    return _last_value(text) or gold if len(text) > 200 else gold


def visible(text: str) -> str:
    """The text meant for the reader: without thoughts, and up to where another speaker begins."""
    text = text.rpartition("</think>")[2]
    start = text.rfind("<think>")
    text = text[:start] if start >= 0 else text
    if marker := _MARKER.search(text, 1):
        text = text[: marker.start()]
    if _OVERESCAPED.search(text):
        text = re.sub(r"\\\\(?=[A-Za-z(\[)\]])", r"\\", text)
    return text


def _stated(text: str) -> Statement | None:
    inside = tag_content(text)
    if inside is not None:
        found = _stated(inside)
        return found or Statement(_formula_answer(inside[:TAIL]) or inside, 0)
    boxed = _joined_boxes(text)
    offset = max(boxed.start if boxed else 0, len(text) - TAIL)
    said = _sentence(text[offset:])
    if boxed is None:
        hashed = _hashed(text[offset:])
        return hashed if hashed and (said is None or hashed.start > said.start) else said
    if said is not None and said.denied:
        return Statement(None, said.start) if boxed.answer in said.denied else boxed
    if said is not None and (said.answer is None or re.match(r"\W*[\d\\$(\[]", said.answer)):
        return said
    return boxed


def _hashed(text: str) -> Statement | None:
    last = last_match(_HASH, text)
    if last is None:
        return None
    answer = text[last.end() :].strip(" \t").partition("\n")[0].strip()
    return Statement(re.sub(r"(?<=\d)\.$", "", answer), last.start())


def _joined_boxes(text: str) -> Statement | None:
    """The last box, joined with preceding boxes enumerated with it; `start` is where the boxes end."""
    spans = box_spans(text)
    if not spans:
        return None
    kept = [spans[-1]]
    for span in spans[-2 : -MOST_BOXES - 1 : -1]:
        gap = text[span[1] : kept[0][0]]
        if len(gap) > 60 or not span[2] or not kept[0][2] or not _are_joined(gap):
            break
        kept.insert(0, span)
    contents = list(dict.fromkeys(content for *_, content in kept))
    if len(contents) == 1:
        return Statement(contents[0], kept[-1][1])
    mark = "; " if any(len(split(content, (",",))) > 1 for content in contents) else ", "
    return Statement(mark.join(contents), kept[-1][1])


def _are_joined(gap: str) -> bool:
    """Whether the text between two boxes enumerates them: `, `, ` and `, ` papers and `, ` for part (a) and `."""
    gap = re.sub(r"\$|\\[()\[\]]|\\q?quad|\\[,;:! ]", " ", TEXT.sub(r" \1 ", gap))
    if re.fullmatch(r"[\s+,;&]*", gap):
        return True
    if _NO_JOIN.search(gap) or re.search(r"[.!?]\s|[.!?]$|\n\s*\n", gap):
        return False
    if _JOINS.fullmatch(gap):
        return True
    words = re.match(r"\s*(?:\(?[A-Za-z]+\)?\s+){1,4}", gap)
    return (
        words is not None
        and len(gap) > words.end() - 5
        and re.search(r"(?:,|\band\b)", gap) is not None
        and (_JOINS.fullmatch(gap[re.search(r",|\band\b", gap).start() :]) is not None)
    )


def _sentence(text: str) -> Statement | None:
    """The statement of the last sentence of the form "the answer is …"."""
    anchors, denied = [*_ANCHOR.finditer(text)], ""
    following = len(text)
    for anchor in reversed(anchors[-8:]):
        said = text[anchor.end() : min(anchor.end() + SENTENCE, following)]
        if following < anchor.end() + SENTENCE:
            said = _UP_TO_THE_NEXT.sub("", said)
        following = anchor.start()
        said = said[re.match(r"[\s*_:\"'“]*(?:####)?\s*", said).end() :]
        end = _sentence_end(_masked(said, _formulas(said)))
        if anchor["denied"]:
            denied += f" {said[:end]}"
            continue
        if _WRONG.search(said[:end]) or _RETRACTS.match(said, end):
            return Statement(None, anchor.start())
        answer = _content(said[:end])
        if answer:
            return Statement(None if answer in denied else answer, anchor.start())
        if answer is None and re.search(r"\d|\$|\\", said[:end]):
            break  # it states something that cannot be separated from its words here
    return Statement(None, len(text), denied) if denied else None


def _sentence_end(masked: str) -> int:
    end = re.search(r"[.!?。！？](?=[\s\"'”*)\]]|$)|[。]|\n", masked)
    return end.start() if end else len(masked)


def _masked(text: str, spans: list[Span]) -> str:
    """`text` with its formulas at `spans` blanked out, preserving its length."""
    for start, end, _ in spans:
        text = text[:start] + "\x01" * (end - start) + text[end:]
    return text


def _content(said: str) -> str | None:
    """The answer in the rest of a sentence after "the answer is"; None if the words are more than an answer."""
    said = said.strip(" \t*_\"'“”:")
    said = said[lead.end() :] if (lead := _LEAD.match(said)) else said
    spans = _formulas(said)
    if not spans:
        return _plain_content(said)
    nouns = _NOUNS.match(said)
    start = nouns.end() if nouns else 0
    if said[start : spans[0][0]].strip(" *_\"'") == "" or re.fullmatch(r"\W*\w+\s*=\s*", said[: spans[0][0]]):
        return _cluster(said, spans)
    return _after_copula(said, _masked(said, spans))


def _plain_content(said: str) -> str | None:
    if equation := re.fullmatch(r"\(([^()]*=[^()]*)\)", said.strip()):
        return equation[1]
    if _words_before_a_digit(said) > 1 and not _COPULA.search(said):
        return None  # "Jane left 3 hours ago": a sentence, not a value
    clause = _CLAUSE.search(said)
    short = (said[: clause.start()] if clause else said).strip(" \t*_\"'“”,")
    if len(re.findall(r"[^\W\d_]{2,}", TEXT.sub("", short))) <= 2 or not _COPULA.search(short):
        return short if len(short.split()) <= 2 * MOST_WORDS and _is_short(short) else None
    return _after_copula(said, said)


def _words_before_a_digit(text: str) -> int:
    """Number of words before the first digit of `text`; `MOST_WORDS` if a script without spaces occurs in it."""
    plain = re.sub(r"\\begin\s*\{\w+\}(?:\{[a-z|]*\})?", "", TEXT.sub("", text))
    digit = re.search(r"\d", plain)
    if digit is None:
        return 0
    before = plain[: digit.start()]
    return MOST_WORDS if _FOREIGN.search(text) else len(re.findall(r"(?<!\\)\b[^\W\d_]{2,}", before))


def _is_short(text: str) -> bool:
    return len(re.findall(r"(?<!\\)\b[^\W\d_]{2,}", TEXT.sub("", text))) <= MOST_WORDS


def _after_copula(said: str, masked: str) -> str | None:
    copulas = [*_COPULA.finditer(masked)]
    if not copulas or _NEGATED.search(masked[: copulas[-1].start()]):
        return None
    rest = said[copulas[-1].end() :].strip()
    return _content(rest) if rest and rest != said else None


def _cluster(text: str, spans: list[Span]) -> str:
    """The first of the formulas and those enumerated with it, with the unit or other words that belong to them."""
    _, end, answer = spans[0]
    for start, stop, content in spans[1:]:
        gap = text[end:start]
        if not _JOINED.fullmatch(gap):
            break
        answer, end = f"{answer} {gap.strip() or ','} {content}", stop
    return _with_tail(answer, text[end:])


def _with_tail(answer: str, tail: str) -> str:
    """The answer plus what follows it if that changes it: a unit, a percent sign, `million`, `or 8`."""
    tail = tail.strip().strip("*_\"'”,.;")
    if not tail.strip():
        return answer
    if tail.lstrip("\\").startswith("%"):
        return answer + "%"
    word = re.match(r"[\s(]*([A-Za-z]+)", tail)
    first = word[1].lower() if word else ""
    if first in ("where", "when", "for", "with", "as", "because", "since", "which", "of", "in", "on", "at", "years"):
        return f"{answer} {tail}" if _REFUTED.search(tail) else answer
    if not word or first in NOT_UNITS or first in SCALES or _REFUTED.search(tail) or re.match(r"\s*[\d=+*/^-]", tail):
        return f"{answer} {tail}"
    words = re.match(r"[\s]*[A-Za-z²³^/ ]{1,30}", tail)
    unit = words[0].strip() if words else ""
    if unit and len(unit.split()) <= 3 and unit_of(rf"\text{{{unit}}}", True) is not None:
        return rf"{answer} \text{{ {unit} }}"
    return answer


def _formula_answer(text: str) -> str | None:
    """The joined formulas of a text that contains nothing else; None for any other text."""
    text = text.strip()
    spans = _formulas(text)
    if not spans or spans[0][0] > 0:
        return None
    end = spans[0][1]
    for start, stop, _ in spans[1:]:
        if not _JOINED.fullmatch(text[end:start]):
            return None
        end = stop
    rest = text[end:].strip(" .,")
    if rest and not re.fullmatch(r"\\?%|[A-Za-z²³^/ ]{1,30}", rest):
        return None
    if _SPEAKS.search(rest):
        return None
    return _cluster(text, spans)


def _formulas(text: str) -> list[Span]:
    r"""(start, end, content) of every `$…$`, `$$…$$`, `\(…\)` and `\[…\]`; inline ones do not span lines.

    A dollar sign for money opens nothing: what it would enclose is prose or is followed by a digit.
    """
    return [span for span in _delimited(text) if span[2] is not None]


def _delimited(text: str) -> list[Span]:
    """The spans of `_formulas`, plus inline formulas broken over lines, which have None as content."""
    found, opened, broken = [], None, None
    for token in _DELIMITER.finditer(text):
        mark = token[0]
        if mark in ("\\\\", "\\$"):
            continue
        if opened is None:
            if mark in ("$", "$$", "\\(", "\\["):
                if broken is not None and mark == text[broken : broken + 1]:
                    found.append((broken, token.end(), None))
                    broken = None
                else:
                    opened = token
            elif mark == "\\)" and broken is not None:
                found.append((broken, token.end(), None))
                broken = None
            continue
        closing = {"\\(": "\\)", "\\[": "\\]"}.get(opened[0], opened[0])
        content = text[opened.end() : token.start()]
        if mark == closing:
            if content.strip() and _is_formula_text(opened[0], content, text[token.end() : token.end() + 1]):
                if "\\begin" not in content:  # a line break, or over-escaped: left to math-verify
                    content = re.sub(r"\\\\(?=[A-Za-z])", r"\\cr ", content)
                found.append((opened.start(), token.end(), content.strip()))
                opened = None
            else:
                opened = token if mark in ("$", "$$") else None
        elif mark == "\n" and opened[0] in ("$", "\\("):
            broken = opened.start() if not content.strip() else None
            opened = None
        elif mark in ("\\(", "\\[") or (mark in ("$", "$$") and opened[0] in ("\\(", "\\[")):
            opened = token
    return found


def _is_formula_text(mark: str, content: str, following: str) -> bool:
    if mark != "$":
        return True
    return not following.isdigit() and not _PROSE.search(re.sub(r"\\[A-Za-z]+\s*\{[^{}]*\}|\\[A-Za-z]+", "", content))


def _is_bare(text: str) -> bool:
    """Whether the whole text is an answer: one short line that is not a sentence."""
    if "\n" in text.strip() or len(text) > 2 * SENTENCE or _LABEL.match(text):
        return False
    plain = TEXT.sub(" ", text)
    masked = _masked(plain, _formulas(plain))
    if _FOREIGN.search(masked) and re.search(r"\d|^[A-H](?![A-Za-z])", masked):
        return False
    spans = _formulas(text)
    if spans and _formula_answer(text) is None:
        return False
    words = re.findall(r"(?<!\\)\b[^\W\d_]{2,}", masked)
    if not spans and _words_before_a_digit(masked) > 1:
        return False
    return len(words) <= MOST_WORDS and not _SPEAKS.search(masked) and not re.search(r"[^\W\d][.!?]\s+\w", masked)


def _last_value(text: str) -> str | None:
    """The last formula or number of `text`, with values enumerated with it; None if the context rules it out."""
    spans = _delimited(text)
    masked = _masked(text, spans)
    numbers = [match for pattern in (_NUMBER, _CJK_NUMBER) for match in pattern.finditer(masked)]
    values = [*spans, *((number.start(), number.end(), number[0]) for number in numbers)]
    values = sorted({value[1]: value for value in sorted(values, key=lambda v: (v[1], -v[0]))}.values())
    while values and values[-1][2] is not None and _SYMBOL.fullmatch(values[-1][2]) and len(values) > 1:
        values.pop()
    if not values:
        return _last_choice(text)
    start, end, content = values[-1]
    if content is None:
        return None
    first = len(values) - 1
    while (
        first and values[first - 1][2] is not None and (gap := masked[values[first - 1][1] : values[first][0]]).strip()
    ):
        if not re.fullmatch(r"\s*(?:,|;|&|(?:,\s*)?(?:and|or|to|through|[-–—]))\s*", gap):
            break
        first -= 1
    before = masked[values[first - 1][1] if first else 0 : values[first][0]]
    before = re.split(r"[.!?。](?:\s|$)|\n\s*\n", before)[-1]
    after = masked[end:]
    sentence = after[: _sentence_end(after)]
    if _HEDGED.search(before) or _REFUTED.search(sentence) or _RETRACTS.match(after, len(sentence)):
        return None
    if any(span[0] == start for span in spans):
        formulas = [span for span in spans if span[2] is not None and span[0] >= values[first][0]]
        return _cluster(text, formulas) if formulas[0][0] == values[first][0] else None
    if not _stands_alone(masked, start, end):
        return None
    if first < len(values) - 1:
        return ", ".join(value[2] for value in values[first:])
    unit = _GLUED_UNIT.match(masked, end)
    if unit:
        return content + unit[0]
    return _with_tail(content, _unit_words(sentence)) if sentence[:1].isspace() else content


def _unit_words(sentence: str) -> str:
    """The word after a number if it may be a percent sign, a unit or a scale."""
    word = re.match(r"\s+(\\?%|[$€£]|[A-Za-z]+(?:[²³])?)", sentence)
    if not word or word[1] in ("$", "€", "£"):
        return ""
    name = word[1].lower()
    return word[1] if name in SCALES or name in NOT_UNITS or word[1].lstrip("\\") == "%" else ""


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether a number is not part of a plain-text formula such as `2x + 3`, `x^2` or `7 = 8 - 1`."""
    left, right = text[:start].rstrip(), text[end:].lstrip()
    if left.endswith(("+", "/", "^", "×", "÷", "·", "<", ">", "≤", "≥", "≠", "~", "≈", "±", "_", "|")):
        return False
    if left.endswith("*") and not left.endswith("**"):
        return False
    if re.search(r"[\w)]\s*[-−]$", left) and text[start - 1 : start].isspace():
        return False
    if re.match(r"[+^=<>≤≥×÷−!≈_]|\*(?!\*)|/", right) or re.match(r"[-]\s*\d", right):
        return False
    glued = text[end : end + 1]
    return not (glued.isascii() and glued.isalpha()) or _GLUED_UNIT.match(text, end) is not None


def _last_choice(text: str) -> str | None:
    """The option letter that a text without formulas and numbers settles on."""
    if start := re.match(r"\(?([A-H])\)?(?:[.:,。，、]\s*\S|(?=[^\x00-\x7f]))", text):
        return start[1]
    anchor = last_match(_ANCHOR, text)
    if anchor is not None and (first := _CHOICE.search(text, anchor.end())):
        if not _NEGATED.search(text[anchor.end() : first.start()]):
            return first[1]
    letters = [*_CHOICE.finditer(text)]
    if not letters:
        return None
    before = text[letters[-2].end() if len(letters) > 1 else 0 : letters[-1].start()]
    before = re.split(r"[.!?,;]\s", before)[-1]
    return None if _HEDGED.search(before) or _REFUTED.search(text[letters[-1].end() :]) else letters[-1][1]
