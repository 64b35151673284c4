"""Load problems from a hub id or a local file, as questions, reference answers and chat prompts.

Reads jsonl (also gzipped), json, csv, tsv and parquet files, a directory with one file per split, data sets written by
`datasets` with `save_to_disk` (a `Dataset`, or a `DatasetDict` for a directory of splits), and hub datasets. An
unusable row is reported by file and line; `data.max_bad_fraction` sets how many of them a run accepts. A question is
text, or a conversation of chat messages that ends with the user's; a function of the user's may make it of the whole
row (`own_format.py`). Imports no torch and no transformers, so `--dry_run` and the eval tool can use it.
"""

import csv
import difflib
import gzip
import hashlib
import io
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kit.core.chat import question_messages, token_ids
from kit.core.errors import BadInput
from kit.core.user_files import open_file
from kit.data.own_format import KEY, Formatter, load_format
from reward import is_own
from reward.answer import boxed_answer, hash_answer
from reward.code_gold import FORMATS as CODE_FORMATS
from reward.code_gold import gold_from_row, shown_test
from reward.countdown import read_gold as read_countdown
from reward.exact import gold_fault
from reward.gold import GoldCheck, math_golds
from reward.own import RESERVED

if TYPE_CHECKING:
    import datasets

    from kit.core.config.schema import DataConfig

TEXT_FORMATS = ("gsm8k", "boxed", "plain")  # whose answers a parser compares
ANSWER_FORMATS = (*TEXT_FORMATS, "countdown", *CODE_FORMATS, "any")
SUFFIXES = (".jsonl", ".parquet", ".json", ".jsonl.gz", ".csv", ".tsv")
NO_SPLITS = ("dataset_dict.json", "manifest.json")  # beside splits: a DatasetDict's list of them, this kit's record
SHOWN = 5  # bad rows listed in an error
ROLES = ("system", "developer", "user", "assistant", "tool")
# Columns of TRL's and verl's data sets, taken if the default column is absent.
KNOWN_QUESTIONS = ("prompt",)
KNOWN_ANSWERS = ("solution", "reward_model.ground_truth")
MOST_LINE = 1 << 26  # bytes of one row of a jsonl file
# A compressed file that grows so much is no set of problems: a text's lines are rarely a tenth of their size.
MOST_GROWTH, GROWS_FROM = 200, 1 << 26  # bytes out for one in; bytes out from which it counts
SAMPLED_ROWS = 100  # whose columns count as those of the data set, before it is read


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer. `id` is a hash of both, so it does not depend on the row order.

    The question of a conversation is the text of its messages without the system's.
    """

    id: str
    question: str
    gold: str
    source: str  # "file:line" (or "hub-id[split]:row"), for error messages
    messages: list[dict] | None = field(default=None, compare=False)  # {role, content} of a conversation; None: text
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the row as it was read


@dataclass
class LoadReport:
    """Report of `read_problems`: rows read, unusable rows (place and reason), repeated questions."""

    rows: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    skipped: int = 0  # rows for which `data.format` returned None
    taken: str = ""  # the columns that were recognized instead of the default ones

    def summary(self) -> str:
        """One line for the log."""
        counts = f"{self.rows:,} rows, {len(self.bad):,} bad, {len(self.duplicates):,} repeated questions"
        counts += f", {self.skipped:,} skipped by data.format" if self.skipped else ""
        return f"{counts}, {self.taken}" if self.taken else counts


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that `prompt_lengths` needs."""

    def apply_chat_template(self, conversation: list[dict], **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Row:
    """A row of a source with its place; `value` is None for one that is not an object, and `error` says why."""

    source: str
    value: dict | None
    error: str = ""


def load_problems(data: "DataConfig", split: str, checks: Mapping[str, GoldCheck] | None = None) -> list[Problem]:
    """The usable problems of the "train" or "eval" split in file order, at most `max_{split}_problems` of them.

    `checks` are the reward functions' checks of references, by their names (`reward.gold_checks`): a row whose
    reference no completion can match is unusable. Raises `BadInput` if the source is missing, a column does not exist,
    or more than `max_bad_fraction` of the rows are unusable. `read_problems` returns the report as well.
    """
    return read_problems(data, split, checks)[0]


def read_problems(
    data: "DataConfig", split: str, checks: Mapping[str, GoldCheck] | None = None
) -> tuple[list[Problem], LoadReport]:
    """`load_problems` and the `LoadReport` of what was skipped."""
    if split not in ("train", "eval"):
        raise BadInput(f"unknown split {split!r}: use 'train' or 'eval'.")
    if data.answer_format not in ANSWER_FORMATS:
        raise BadInput(f"data.answer_format is {data.answer_format!r}: use one of {', '.join(ANSWER_FORMATS)}.")
    if data.answer_column is None and data.answer_format != "any":
        raise BadInput(
            f"data.answer_column is null and data.answer_format {data.answer_format}, which reads it. Without "
            "references set data.answer_format to any."
        )
    report = LoadReport()
    problems: list[Problem] = []
    seen: dict[str, Problem] = {}  # by question, or messages as JSON
    repeats: Counter[str] = Counter()
    columns_checked, own = False, load_format(data)
    for row in split_rows(data, split):
        report.rows += 1
        if row.value is not None and not columns_checked:
            data, report.taken = _recognized(row.value, data)
            _check_columns(row, data)
            columns_checked = True
        problem, error = _problem(row, data, own)
        if problem is None and not error:
            report.skipped += 1
            continue
        if problem is None:
            report.bad.append((row.source, error))
            continue
        key = problem.question if problem.messages is None else json.dumps(problem.messages)
        if data.heldout_fraction is not None and is_held_out(key, data) != (split == "eval"):
            report.rows -= 1
            continue
        if (known := seen.setdefault(key, problem)) is problem:
            problems.append(problem)
        elif data.repeated_questions == "keep":
            problems.append(_repeated(problem, repeats))
        else:
            report.duplicates.append(f"{problem.source} repeats {known.source}")
            if known.gold != problem.gold:
                report.bad.append((row.source, f"same question as {known.source}, other answer {problem.gold[:40]!r}"))
    of_rewards = checks or {}
    if data.answer_format in TEXT_FORMATS:  # a parser compares them whatever the rewards are: eval does by default
        of_rewards = {"": math_golds} | {name: check for name, check in of_rewards.items() if check is not math_golds}
    for name, check in of_rewards.items():
        unreadable = _unreadable(name, check, [problem.gold for problem in problems])
        report.bad += [(problems[index].source, why) for index, why in unreadable.items()]
        problems = [problem for index, problem in enumerate(problems) if index not in unreadable]
    _check_bad(report, data, split)
    limit = data.max_train_problems if split == "train" else data.max_eval_problems
    return problems[:limit], report


def is_held_out(question: str, data: "DataConfig") -> bool:
    """Whether `data.heldout_fraction` keeps a question from training. A hash of its words and `heldout_seed` decides:
    neither the order of the rows nor new ones move a problem, and its repetitions stay on its side."""
    words = json.dumps([data.heldout_seed, " ".join(question.casefold().split())])
    digest = hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < data.heldout_fraction * 2**64


def _repeated(problem: Problem, repeats: Counter[str]) -> Problem:
    """The problem with an id that its other columns decide, and for equal rows their number."""
    row = json.dumps([problem.id, problem.columns], sort_keys=True, default=str)
    repeats[row] += 1
    digest = hashlib.blake2b(json.dumps([row, repeats[row]]).encode(), digest_size=8).hexdigest()
    return replace(problem, id=digest)


def _unreadable(name: str, check: GoldCheck, golds: list[str]) -> dict[int, str]:
    """{index: why} of references that a reward function's check rejects; raises `BadInput` if a user's check fails."""
    try:
        found = {int(index): str(why) for index, why in check(golds)}
        if any(not 0 <= index < len(golds) for index in found):
            raise IndexError(f"index {max(found)} of {len(golds)} references")
    except Exception as error:
        if not is_own(name):
            raise
        raise BadInput(
            f"reward {name!r}: its check_golds failed: {type(error).__name__}: {error}. It gets a list of references "
            "and returns [(index, why)] for those that no completion can match."
        ) from error
    return {index: f"reward {name}: {why}" if name else why for index, why in found.items()}


def first_row(data: "DataConfig", split: str) -> dict:
    """The first row of a split that is an object, which shows its columns; {} if there is none."""
    return next((row.value for row in split_rows(data, split) if row.value is not None), {})


def reward_columns(data: "DataConfig", split: str) -> list[str]:
    """The columns that rows of a split bring to rewards by their own names: those of its first `SAMPLED_ROWS` rows."""
    rows = itertools.islice(split_rows(data, split), SAMPLED_ROWS)
    return _own_columns(row.value for row in rows if row.value is not None)


def _own_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Columns of `rows` in the order of their first occurrence, without names that a run gives another meaning."""
    return [name for name in dict.fromkeys(str(key) for row in rows for key in row) if name not in RESERVED]


def hidden_columns(problems: list[Problem], data: "DataConfig") -> list[str]:
    """Columns that rewards do not get by their names, and that are neither the question nor the answer."""
    used = {data.answer_column, *KNOWN_QUESTIONS, *_question_columns({}, data.question_column)}
    return sorted({name for problem in problems for name in problem.columns if name in RESERVED} - used)


def chat_messages(data: "DataConfig", problem: Problem) -> list[dict]:
    """The chat prompt of a problem: the system message if there is one, then the question with `prompt_suffix`.

    A conversation keeps its messages; the system message and the suffix are added in the same places. No chat template
    is applied here: the trainer and the server each apply it once.
    """
    if problem.messages is None:
        return question_messages(problem.question, data.system_prompt, data.prompt_suffix)
    *before, last = problem.messages
    asked = question_messages(last["content"], data.system_prompt, data.prompt_suffix)
    return [*asked[:-1], *before, asked[-1]]


def prompt_of_row(data: "DataConfig", row: dict, source: str) -> list[dict] | None:
    """The chat prompt of the row at `source` without regard to its answer; None if it has no question."""
    data = _recognized(row, data)[0]
    question, messages, error = _asked(Row(source, row), data, load_format(data))
    return None if error or not question else chat_messages(data, Problem("", question, "", "", messages))


def to_dataset(problems: list[Problem], data: "DataConfig") -> "datasets.Dataset":
    """A `datasets.Dataset` with columns prompt (chat messages), gold and problem_id, in the order of `problems`.

    The columns of the data follow under their own names, except those of `RESERVED`. A row without one has None there.
    Raises `BadInput` for a column that Arrow cannot hold.
    """
    from datasets import Dataset, concatenate_datasets

    if not problems:
        raise BadInput("no problems to train or evaluate on.")
    made = {
        "prompt": [chat_messages(data, problem) for problem in problems],
        "gold": [problem.gold for problem in problems],
        "problem_id": [problem.id for problem in problems],
    }
    parts = [Dataset.from_dict(made)]
    for name in _own_columns(problem.columns for problem in problems):
        parts.append(_column(name, [problem.columns.get(name) for problem in problems]))
    return concatenate_datasets(parts, axis=1)


def _column(name: str, values: list) -> "datasets.Dataset":
    """One column of the data. What JSON can hold and is no plain column of one type is stored as JSON, because Arrow
    gives all objects of a column the same keys and refuses values of different types."""
    import pyarrow
    from datasets import Dataset, Features, Json

    def as_arrow() -> Dataset:
        return Dataset.from_dict({name: values})

    def as_json() -> Dataset:
        texts = [None if value is None else json.dumps(value, allow_nan=False) for value in values]
        return Dataset.from_dict({name: texts}, features=Features({name: Json()}))

    kinds = {type(value) for value in values if value is not None}
    is_plain = len(kinds) <= 1 and kinds <= {str, bool, int, float}
    for store in (as_arrow, as_json) if is_plain else (as_json, as_arrow):
        try:
            return store()
        except (TypeError, ValueError, OverflowError, pyarrow.ArrowException):
            continue
    shown = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise BadInput(f"the data's column {name!r} cannot be kept for rewards: it holds {shown}. Remove or convert it.")


def prompt_lengths(problems: list[Problem], tokenizer: Tokenizer, data: "DataConfig") -> list[int]:
    """Prompt length of every problem in tokens, chat template and generation prompt included."""
    lengths = []
    for problem in problems:
        lengths.append(len(token_ids(tokenizer, chat_messages(data, problem), data.chat_template_kwargs)))
    return lengths


def drop_long(
    problems: list[Problem], tokenizer: Tokenizer, data: "DataConfig", max_prompt_length: int, added: int = 0
) -> tuple[list[Problem], int]:
    """The problems whose prompt fits in `max_prompt_length` tokens, and how many were dropped.

    `added` is the number of tokens that an environment's tools and first observation add to each prompt. Prompts are
    never truncated: a truncated question has another answer. Raises `BadInput` if more than `max_bad_fraction` of them
    are too long.
    """
    lengths = [length + added for length in prompt_lengths(problems, tokenizer, data)]
    kept = [problem for problem, length in zip(problems, lengths, strict=True) if length <= max_prompt_length]
    dropped = len(problems) - len(kept)
    if problems and (not kept or dropped > data.max_bad_fraction * len(problems)):
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        raise BadInput(
            f"{dropped:,} of {len(problems):,} prompts are longer than rollout.max_prompt_length "
            f"({max_prompt_length:,} tokens); the longest has {lengths[longest]:,} ({problems[longest].source}). "
            f"Set rollout.max_prompt_length to {lengths[longest]:,}, or drop them with data.max_bad_fraction "
            f"{_fraction_for(dropped, len(problems))} (now {data.max_bad_fraction:g})."
        )
    return kept, dropped


def _problem(row: Row, data: "DataConfig", own: Formatter | None) -> tuple[Problem | None, str]:
    """The problem of a row, or None and the reason, which is empty if the user's function `own` skips the row."""
    if row.value is None:
        return None, row.error
    if data.answer_column is not None and not _has(row.value, data.answer_column):
        return None, f"no column {data.answer_column!r}"
    question, messages, error = _asked(row, data, own)
    if error or not question:
        return None, error
    answer = "" if data.answer_column is None else _value(row.value, data.answer_column)
    if data.answer_format in CODE_FORMATS:
        gold, error = gold_from_row({**row.value, data.answer_column: answer}, data.answer_format, data.answer_column)
    else:
        gold, error = extract_gold(answer, data.answer_format)
    if gold is None:
        return None, error
    texts = [message["content"] for message in messages or ()]
    if not _is_unicode("".join([question, gold, *texts])):
        return None, "an unpaired surrogate (half of a character), which no tokenizer reads"
    if data.answer_format == "mbpp":
        question += shown_test(gold)
        if messages:
            messages[-1]["content"] += shown_test(gold)
    asked = question if messages is None else messages
    digest = hashlib.blake2b(json.dumps([asked, gold]).encode(), digest_size=8).hexdigest()
    return Problem(digest, question, gold, row.source, messages, row.value), ""


def _asked(row: Row, data: "DataConfig", own: Formatter | None) -> tuple[str, list[dict] | None, str]:
    """(question, its messages if it is a conversation, error text) of a row; all empty if `own` skips it."""
    if own is not None:
        if (made := own(row.source, row.value)) is None:
            return "", None, ""
        question, messages, error = _question([made], data)
        return question, messages, error and f"{KEY} {own.name!r}: {error}"
    columns = _question_columns(row.value, data.question_column)
    if missing := [column for column in columns if column not in row.value]:
        return "", None, f"no column {missing[0]!r}"
    return _question([row.value[column] for column in columns], data)


def _question(parts: list, data: "DataConfig") -> tuple[str, list[dict] | None, str]:
    """(question, its messages if it is a conversation, error text) of the values of a row's question columns."""
    if len(parts) == 1 and isinstance(parts[0], list) and parts[0] and all(isinstance(one, dict) for one in parts[0]):
        messages, error = _messages(parts[0], data)
        said = [message["content"] for message in messages if message["role"] not in ("system", "developer")]
        return "\n\n".join(said), messages, error
    for part in parts:
        if part is None or (isinstance(part, str) and not part.strip()):
            return "", None, "the question is empty"
        if not isinstance(part, str):
            return "", None, f"the question is {_shortened(part)}, a {type(part).__name__} and not text or messages"
    return _joined(parts).replace("\r\n", "\n").strip(), None, ""


def _messages(conversation: list[dict], data: "DataConfig") -> tuple[list[dict], str]:
    """The messages of a conversation as {role, content} of text, or [] and why it cannot be a prompt."""
    messages = []
    for number, message in enumerate(conversation, 1):
        where, role = f"message {number} of the prompt", message.get("role")
        if role not in ROLES:
            return [], f"{where} has the role {_shortened(role)}; it must be one of {', '.join(ROLES)}"
        # Arrow fills in None for keys that other messages have.
        if more := [key for key, value in message.items() if key not in ("role", "content") and value is not None]:
            return [], f"{where} has {', '.join(map(str, more))}; a prompt's messages have role and content"
        content, error = message_text(message.get("content"))
        if error:
            return [], f"{where} {error}"
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        return [], f"the prompt ends with the {messages[-1]['role']}'s message; its last one must be the user's"
    if not messages[-1]["content"].strip():
        return [], "the question is empty"
    if data.system_prompt and messages[0]["role"] in ("system", "developer"):
        return [], "the prompt has a system message of its own, and data.system_prompt is set. Set it to null"
    return messages, ""


def message_text(content: Any) -> tuple[str, str]:
    """The text of a message's content, a string or blocks of text, or "" and an error text."""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        return "", f"has content {_shortened(content)}, a {type(content).__name__} and not text"
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text" or not isinstance(block.get("text"), str):
            return "", f"has a content block of type {_shortened(kind)}; only text is supported"
        texts.append(block["text"])
    return "".join(texts), ""


def _recognized(row: dict, data: "DataConfig") -> tuple["DataConfig", str]:
    """`data` with the columns of TRL's or verl's data sets if the default ones are absent from `row`, and a note.

    A no-op if either column was configured.
    """
    defaults = {one.name: one.default for one in fields(data)}
    if any(getattr(data, key) != defaults[key] for key in ("question_column", "answer_column")):
        return data, ""
    taken: dict[str, Any] = {}
    notes = []
    for key, word, known in (
        ("question_column", "questions", KNOWN_QUESTIONS),
        ("answer_column", "answers", KNOWN_ANSWERS),
    ):
        if defaults[key] in row or (key == "question_column" and data.format is not None):
            continue
        if found := [name for name in known if _has(row, name)]:
            taken[key] = found[0]
            notes.append(f"{word} from {found[0]!r}")
    return (replace(data, **taken), ", ".join(notes)) if taken else (data, "")


def _has(row: Mapping[str, Any], path: str) -> bool:
    """Whether a row has the column `path`, or the entry of nested objects that a dotted path names."""
    head, _, rest = path.partition(".")
    if path in row or not rest:
        return path in row
    return isinstance(row.get(head), Mapping) and _has(row[head], rest)


def _value(row: Mapping[str, Any], path: str) -> Any:
    """The value at a column or a dotted path that `_has` found."""
    head, _, rest = path.partition(".")
    return row[path] if path in row else _value(row[head], rest)


def _shortened(value: Any, most: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8; JSON may hold half of a surrogate pair, from a truncated emoji."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _question_columns(row: dict, named: str) -> list[str]:
    """The columns that make up the question: `named`, or its parts if it joins several as `Body+Question`."""
    return [named] if named in row or "+" not in named else named.split("+")


def _joined(parts: list[str]) -> str:
    """Join the columns of a question into one text; a part that ends in a word gets a full stop."""
    if len(parts) == 1:
        return parts[0]
    stripped = [part.strip() for part in parts]
    return " ".join([part + "." if part[-1].isalnum() else part for part in stripped[:-1]] + stripped[-1:])


def extract_gold(answer: Any, answer_format: str) -> tuple[str | None, str]:
    r"""The reference answer in a row's answer column, or None and the reason.

    `gsm8k`: the number after the last `####`. `boxed`: the last balanced `\boxed{}`. `plain`: the whole column, a
    string or a number. `countdown`: JSON with numbers and target. `any`: the column as it is, with anything but text
    as JSON.
    """
    if answer_format == "any":
        return (answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)), ""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool) and answer_format == "plain":
        answer = repr(answer)
    if not isinstance(answer, str):
        return None, f"the answer is {_shortened(answer)}, not text"
    if answer_format == "countdown":
        try:
            return (read_countdown(answer) and answer.strip()), ""
        except ValueError as error:
            return None, str(error)
    if answer_format == "gsm8k":
        gold, form = hash_answer(answer), "'#### number'"
    elif answer_format == "boxed":
        gold, form = boxed_answer(answer), r"balanced \boxed{}"
    else:
        gold, form = answer.strip(), "text"
    if gold is None:
        return None, f"the answer has no {form}"
    fault = gold_fault(gold)
    return (None, fault) if fault else (gold, "")


def split_rows(data: "DataConfig", split: str) -> Iterator[Row]:
    """The rows of the source of a split; with `data.heldout_fraction` both splits have one (`is_held_out`)."""
    if data.heldout_fraction is not None:
        if data.eval_path:
            raise BadInput(
                f"data.heldout_fraction ({data.heldout_fraction:g}) holds problems out of the training split, and "
                f"data.eval_path {data.eval_path} names others. Leave one of them out."
            )
        split = "train"
    split_name = data.train_split if split == "train" else data.eval_split
    path = data.eval_path if split == "eval" and data.eval_path else data.path
    if split == "eval" and path == data.path and path and _is_one_split(Path(path).expanduser()):
        raise BadInput(
            f"data.path is the single file or saved data set {path}, which is what the run trains on. Hold some of "
            "it out with data.heldout_fraction 0.1, name the held-out problems with data.eval_path, or set data.path "
            f"to a directory holding {data.train_split}.jsonl and {split_name}.jsonl."
        )
    if path:
        yield from _file_rows(_split_file(Path(path).expanduser(), split_name, split))
    elif data.id:
        yield from _hub_rows(data, split_name)
    else:
        own = "" if split == "train" else "data.eval_path (held-out problems alone), "
        raise BadInput(f"no data set is named: set {own}data.id (a hub id) or data.path (a local file or directory).")


def _is_one_split(path: Path) -> bool:
    """Whether `path` holds the rows of one split: a file, or what `Dataset.save_to_disk` wrote."""
    return path.is_file() or all((path / name).is_file() for name in ("state.json", "dataset_info.json"))


def _split_file(path: Path, split_name: str, split: str) -> Path:
    """The file of a split: `path` itself, or `<split_name>` with one of `SUFFIXES` in the directory `path`.

    A folder of `save_to_disk` counts as a file, and that of a `DatasetDict` as a directory of them.
    """
    if path.is_dir() and _is_one_split(path):
        return path
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise BadInput(f"{path}: unknown file type {path.suffix!r}. Use {', '.join(SUFFIXES)}.")
        return path
    if not path.is_dir():
        where = f"{path} does not exist (seen from {Path.cwd()})."
        raise BadInput(f"{where} Set data.path to a file or directory, or unset it to use data.id.")
    for suffix in ("", *SUFFIXES):
        if _is_one_split(file := path / f"{split_name}{suffix}"):
            return file
    present = sorted(file.name for file in path.iterdir() if _has_rows(file))
    near = _nearest(split_name, [name.partition(".")[0] for name in present])
    raise BadInput(
        f"{path} has no {split_name}{f', {split_name}'.join(SUFFIXES)}; it has "
        f"{', '.join(present) or 'no such files'}. Set data.{split}_split{near}."
    )


def _has_rows(entry: Path) -> bool:
    """Whether an entry of a directory of splits is one of them, by its name or as a saved data set."""
    return _is_one_split(entry) and (entry.is_dir() or entry.name.endswith(SUFFIXES)) and entry.name not in NO_SPLITS


def _file_rows(file: Path) -> Iterator[Row]:
    if file.is_dir():
        yield from _saved_rows(file)
    elif file.suffix == ".parquet":
        yield from _parquet_rows(file)
    elif file.suffix == ".json":
        yield from _json_rows(file)
    elif file.suffix in (".csv", ".tsv"):
        yield from _csv_rows(file)
    else:
        yield from jsonl_rows(file)


def jsonl_rows(file: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(file), 1):
        source = f"{file}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if text:
                yield _as_row(source, json.loads(text))
        except UnicodeDecodeError as error:
            yield Row(source, None, f"not UTF-8: {error.reason} at byte {error.start}")
        except (ValueError, RecursionError) as error:  # a ValueError: an integer of thousands of digits
            yield Row(source, None, f"invalid JSON: {error}")


def _lines(file: Path) -> Iterator[bytes]:
    # Split on \n alone: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    with open_file(file) as stored:
        try:
            lines = gzip.GzipFile(fileobj=stored) if file.suffix == ".gz" else stored
            while line := lines.readline(MOST_LINE + 1):
                if len(line) > MOST_LINE:
                    raise BadInput(f"{file} has a line of more than {MOST_LINE:,} bytes. Write one object per line.")
                _check_growth(file, lines.tell(), stored.tell())
                yield line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadInput(f"{file} is not a whole gzip file: {error}") from None


def _check_growth(file: Path, out: int, stored: int) -> None:
    """Raise `BadInput` if `stored` bytes of a compressed file have made so many that it was written to fill memory."""
    if out > GROWS_FROM and out > MOST_GROWTH * stored:
        raise BadInput(
            f"{file} grows more than {MOST_GROWTH} times when it is unpacked ({stored:,} bytes to {out:,}): it is no "
            "set of problems. Unpack it yourself if it is."
        )


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        with open_file(file) as stored:
            rows = json.loads(stored.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file} is not JSON: {error}. One object per line belongs in a .jsonl file.") from None
    if not isinstance(rows, list):
        raise BadInput(f"{file} holds a {type(rows).__name__}, expected a list of objects.")
    for number, row in enumerate(rows, 1):
        yield _as_row(f"{file}:{number}", row)


def _csv_rows(file: Path) -> Iterator[Row]:
    """Rows of a table whose first line names the columns; every value is text, and an empty one is missing."""
    csv.field_size_limit(sys.maxsize)  # a field of 128 KiB would end the file
    try:
        with open_file(file) as stored, io.TextIOWrapper(stored, newline="", encoding="utf-8-sig") as lines:
            table = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
            names = table.fieldnames or []
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise BadInput(f"{file} has several columns {twice[0]!r}. Rename one in its first line.")
            for row in table:
                source = f"{file}:{table.line_num}"
                if (more := row.pop(None, None)) is not None or None in row.values():
                    found = len(names) + len(more or []) - sum(value is None for value in row.values())
                    yield Row(source, None, f"{found} fields, the first line names {len(names)} columns")
                else:
                    yield Row(source, {name: value or None for name, value in row.items()})
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{file} is not a table: {error}.") from None


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with open_file(file) as stored, pyarrow.parquet.ParquetFile(stored) as table:
            groups = [table.metadata.row_group(index) for index in range(table.metadata.num_row_groups)]
            size = file.stat().st_size
            _check_growth(file, sum(group.total_byte_size for group in groups), size)
            if table.metadata.num_rows > max(SAMPLED_ROWS, size):
                raise BadInput(f"{file} has {table.metadata.num_rows:,} rows in {size:,} bytes: they are all alike.")
            number = 0
            for batch in table.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield _as_row(f"{file}:{number}", row)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{file} is not a readable parquet file: {error}") from None


def _saved_rows(folder: Path) -> Iterator[Row]:
    from datasets import load_from_disk

    try:
        rows = load_from_disk(str(folder))
        for number, row in enumerate(rows, 1):
            yield _as_row(f"{folder}:{number}", row)
    except Exception as error:  # a missing or truncated file: Arrow's errors and datasets' share no base class
        reason = str(error).strip().splitlines()
        raise BadInput(
            f"{folder} is not a whole data set of save_to_disk: {type(error).__name__}: "
            f"{reason[0] if reason else 'no message'}. Save it again."
        ) from error


def _hub_rows(data: "DataConfig", split_name: str) -> Iterable[Row]:
    from datasets import load_dataset

    arguments = (data.id, data.config) if data.config else (data.id,)
    try:
        rows = load_dataset(*arguments, split=split_name)
    except Exception as error:  # the hub's errors share no base class: offline, gated, unknown id, config or split
        reason = str(error).strip().splitlines()
        raise BadInput(
            f"cannot load data.id {data.id!r} (config {data.config!r}, split {split_name!r}): "
            f"{type(error).__name__}: {reason[0] if reason else 'no message'}. Check the id, data.config and the "
            "split names; without network access set data.path to a local jsonl or parquet file, or to a directory "
            f"holding {split_name}.jsonl."
        ) from error
    return (_as_row(f"{data.id}[{split_name}]:{number}", row) for number, row in enumerate(rows, 1))


def _as_row(source: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(source, value)
    return Row(source, None, f"a JSON {type(value).__name__}, expected an object")


def _check_columns(row: Row, data: "DataConfig") -> None:
    """Raise `BadInput` for a column that the first row lacks: that is a wrong name in the config, not a bad row."""
    named = [] if data.format else _question_columns(row.value, data.question_column)
    columns = [("question_column", name) for name in named]
    for key, name in (*columns, ("answer_column", data.answer_column)):
        if name is not None and not (name in row.value if key == "question_column" else _has(row.value, name)):
            raise BadInput(
                f"{row.source} has no column {name!r}; it has {', '.join(map(str, row.value)) or 'none'}. "
                f"Set data.{key}{_nearest(name, list(row.value))}."
            )


def _nearest(name: str, known: list[str]) -> str:
    folded = {str(candidate).lower(): str(candidate) for candidate in known}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.4)
    return f" to {folded[match[0]]!r}" if match else ""


def _check_bad(report: LoadReport, data: "DataConfig", split: str) -> None:
    if not report.rows:
        raise BadInput(f"the {split} split has no rows.")
    if report.skipped == report.rows:
        raise BadInput(f"data.format {data.format!r} skipped each of {report.rows:,} rows of the {split} split.")
    bad = len(report.bad)
    if bad == report.rows or bad > data.max_bad_fraction * report.rows:
        places = "".join(f"\n  {source}: {error}" for source, error in report.bad[:SHOWN])
        more = f"\n  … and {bad - SHOWN:,} more" if bad > SHOWN else ""
        raise BadInput(
            f"{bad:,} of {report.rows:,} rows of the {split} split cannot be used "
            f"(data.max_bad_fraction is {data.max_bad_fraction:g}):{places}{more}\n"
            f"Fix these rows, check data.answer_format ({data.answer_format}) and the column names, or skip them with "
            f"data.max_bad_fraction {_fraction_for(bad, report.rows)}."
        )


def _fraction_for(bad: int, rows: int) -> str:
    """The smallest fraction with four decimals that admits `bad` of `rows`."""
    return f"{-(-bad * 10_000 // rows) / 10_000:g}"
