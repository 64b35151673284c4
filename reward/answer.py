r"""Extract a completion's answer and decide whether it equals the reference.

Extraction: the last balanced `\boxed{}`, else the last `#### n`; text that repeats the prompt is not the model's.
Comparison: `reward.exact` if no algebra is needed, else math-verify in killable workers (`reward.pool`).
"""

import itertools
import json
import re
from dataclasses import asdict
from functools import lru_cache

from reward import exact
from reward.pool import Verdict, WorkerPool, shared_pool

_BOX_TOKENS = re.compile(r"\\boxed(?![A-Za-z])\s*(\{?)|\\.|[{}]", re.DOTALL)
_HASH = re.compile(r"(?<!#)####(?!#)[ \t]*([-+\u2212]?[ \t]*[\d.$€£¥₹\\(][^\n]*)")
_NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-\u2212])?\\?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?")
_BARE_WORD = re.compile(r"[^\s$\\{}]+")
_ANSWER_TAG = re.compile(
    r"\\boxed(?![A-Za-z])|(?<!#)####(?!#)|(?i:\b(?:answer|solution|result)s?\s+(?:is|are)\b|\banswers?\s*:)"
)
_BARE_TAG = re.compile(
    r"[\W_]*(?:\\boxed\s*\{?[^{}\n]*\}?|####[^\n]*"
    r"|(?i:(?:so|thus|hence|therefore)?,?\s*(?:the )?(?:final )?answer(?: is|\s*:)\s*[^\s\\]{1,12}))[\W_]*"
)


def boxes(text: str) -> list[str]:
    r"""The contents of every balanced `\boxed{…}` and `\boxed 5`, in the order in which they end, outermost only."""
    return [content for *_, content in box_spans(text)]


def box_spans(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of every box that `boxes` returns.

    One pass over the text: 100,000 unclosed boxes cost no more than their length. A box whose whole content is another
    box yields the inner content once.
    """
    found: list[tuple[int, int, int, int]] = []  # box start and end, content start and end
    braces: list[tuple[int | None, int]] = []  # per open brace: start of its \boxed (or None), start of its content
    for token in _BOX_TOKENS.finditer(text):
        if token[0] == "}" and braces:
            start, content = braces.pop()
            if start is None:
                continue
            box = (start, token.end(), content, token.start())
            inner = []
            while found and found[-1][0] > start:
                inner.append(found.pop())
            if len(inner) == 1 and _blank(text, content, inner[0][0]) and _blank(text, inner[0][1], token.start()):
                box = (start, token.end(), *inner[0][2:])
            found.append(box)
        elif token[0] == "{":
            braces.append((None, token.end()))
        elif token[0].startswith("\\boxed"):
            if token[1]:
                braces.append((token.start(), token.end()))
            elif word := _BARE_WORD.match(text, token.end()):
                end = word.start() + len(word[0].rstrip(".,;:!?"))
                found.append((token.start(), word.end(), word.start(), end))
    return [(start, stop, text[content:end].strip()) for start, stop, content, end in found]


def _blank(text: str, start: int, end: int) -> bool:
    return start == end or text[start:end].isspace()


def boxed_answer(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{}`; "" if it is empty, None if there is none."""
    found = boxes(text)
    return found[-1] if found else None


def hash_answer(text: str) -> str | None:
    """The text after the last `####` that is followed by a number, up to the end of the line (GSM8K's form)."""
    match = last_match(_HASH, text)
    return match[1].strip() if match else None


def final_answer(text: str) -> str | None:
    r"""The last balanced `\boxed{}`, else the last `#### n`, else None."""
    answer = boxed_answer(text)
    return hash_answer(text) if answer is None else answer


def tag_answer(text: str, tag: str = "<answer>") -> str | None:
    r"""The content of the last complete `<answer>…</answer>`, or the last `\boxed{}` in it if there is one."""
    inside = tag_content(text, tag)
    boxed = None if inside is None else boxed_answer(inside)
    return inside if boxed is None else boxed


def tag_content(text: str, tag: str = "<answer>") -> str | None:
    """The content of the last complete `<answer>…</answer>`; None if there is none."""
    end = text.rfind(f"</{tag[1:]}")
    start = text.rfind(tag, 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) : end].strip()


def last_number(text: str) -> str | None:
    """The last number written in the text, with its sign, commas and currency sign."""
    match = last_match(_NUMBER, text)
    return match[0] if match else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of `pattern`, searched from the left."""
    match = None
    for match in pattern.finditer(text):  # noqa: B007
        pass
    return match


def message_text(message: str | list[dict] | None) -> str:
    """The text of a completion or prompt in either of TRL's formats: a string, or a list of chat messages.

    In a completion with several turns, only the model's own count: text from a tool or an environment is no answer.
    """
    if message is None:
        return ""
    if isinstance(message, str):
        return message
    if message and message[0].get("role") == "assistant":
        message = [part for part in message if part.get("role") == "assistant"]
    return "\n\n".join(_content(part) for part in message)


def _content(message: dict) -> str:
    content = message.get("content")
    if isinstance(content, list):  # multimodal form: [{"type": "text", "text": …}]
        return "\n".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""


def own_text(completion: str | list[dict] | None, prompt: str | list[dict] | None) -> str:
    r"""The completion without passages that repeat the prompt, whatever their spacing.

    A passage is a whole prompt message, a paragraph of it with an answer tag, one line or two consecutive lines with
    an answer tag and other words, or a sentence with an empty box. A line that is a bare `\boxed{7}` or `#### 7` is
    kept: the model may have written it itself.
    """
    text = message_text(completion)
    messages = (prompt,) if isinstance(prompt, str) else tuple(_content(message) for message in prompt or ())
    squeezed = "".join(text.split())
    for words in _prompt_passages(messages):
        if "".join(words) in squeezed:  # compiling a whole prompt costs milliseconds: only for an echo
            text = re.sub(r"\s+".join(map(re.escape, words)), "\n", text)
    return text


@lru_cache(maxsize=256)
def _prompt_passages(messages: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    passages = {message.strip() for message in messages if len(message.strip()) >= 12 or _ANSWER_TAG.search(message)}
    for message in messages:
        lines = message.splitlines()
        pairs = map("\n".join, itertools.pairwise(lines))  # "3+4 is 7." above a bare "#### 7"
        for piece in (*re.split(r"\n\s*\n", message), *lines, *pairs):
            piece = piece.strip()
            if _ANSWER_TAG.search(piece) and not _BARE_TAG.fullmatch(piece):
                passages.add(piece)
                # Also "Put the answer in \boxed{}." alone: its empty box is never the model's answer.
                passages.update(s for s in re.split(r"(?<=[.!?])\s+", piece) if (b := boxes(s)) and not any(b))
    return tuple(tuple(passage.split()) for passage in sorted(passages, key=len, reverse=True) if passage.strip())


def answers_equal(
    predicted: str | None, gold: str, pool: WorkerPool | None = None, policy: exact.Policy = exact.DEFAULT
) -> bool | None:
    """Whether the predicted answer equals the reference; None if that cannot be decided within the limits.

    Numbers, words and anything with a normal form (`reward.algebra`) are compared exactly in this process; the rest
    goes to math-verify in a killable worker. `pool` defaults to one with two workers and 2 s per sample, started on
    first use.
    """
    return judge([(predicted, gold)], pool, policy)[0].value


def judge(
    pairs: list[tuple[str | None, str]], pool: WorkerPool | None = None, policy: exact.Policy = exact.DEFAULT
) -> list[Verdict]:
    """Return a `Verdict` for every (predicted, gold) pair, in order; only pairs that need sympy reach the pool."""
    known: dict[tuple[str | None, str], Verdict | None] = {}
    for pair in dict.fromkeys(pairs):
        if len(pair[1]) > exact.MAX_ANSWER_CHARS and pair[0] is not None and pair[0].strip() != pair[1].strip():
            known[pair] = Verdict(None, "gold")
            continue
        value = exact.decide(*pair, policy)
        known[pair] = None if value is None else Verdict(value, "exact")
    open_pairs = [pair for pair, verdict in known.items() if verdict is None]
    if open_pairs:
        prepared = [(exact.prepared(p, policy), exact.prepared(g, policy)) for p, g in open_pairs]
        settings = "" if policy == exact.DEFAULT else json.dumps(asdict(policy))
        known |= zip(open_pairs, (pool or shared_pool()).compare(prepared, settings), strict=True)
    return [known[pair] for pair in pairs]


def check_golds(golds: list[str], pool: WorkerPool | None = None) -> list[tuple[int, str]]:
    """(index, fault) for every reference answer that no prediction could be compared with.

    Plain numbers, words and formulas of `reward.formula` are read here; the rest is parsed by math-verify in the
    workers, each distinct text once. Starts no process if nothing is left to parse.
    """
    found: list[tuple[int, str]] = []
    left: dict[str, list[int]] = {}  # indices by text
    for index, gold in enumerate(golds):
        if fault := exact.gold_fault(gold):
            found.append((index, fault))
        elif not exact.is_readable(gold):
            left.setdefault(exact.prepared(gold), []).append(index)
    if left:
        verdicts = (pool or shared_pool()).compare([(None, text) for text in left])
        for indices, verdict in zip(left.values(), verdicts, strict=True):
            if verdict.value is None:
                why = "cannot be parsed" if verdict.reason == "gold" else f"cannot be parsed ({verdict.reason})"
                found += [(index, f"the answer {golds[index][:60]!r} {why}") for index in indices]
    return sorted(found)
