"""Load problems from a hub id or a local file, as questions, reference answers and chat prompts.

Reads jsonl (also gzipped), json and parquet files, a directory with one file per split, data sets written by
`datasets` with `save_to_disk` (a `Dataset`, or a `DatasetDict` for a directory of splits), and hub datasets. An
unusable row is reported by file and line; `data.max_bad_fraction` sets how many of them a run accepts. Imports no
torch and no transformers, so `--dry_run` and the eval tool can use it.
"""

import difflib
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kit.core.chat import question_messages, token_ids
from kit.core.errors import BadInput
from reward import is_own
from reward.answer import boxed_answer, hash_answer
from reward.code_gold import FORMATS as CODE_FORMATS
from reward.code_gold import gold_from_row, shown_test
from reward.countdown import read_gold as read_countdown
from reward.exact import gold_fault
from reward.gold import GoldCheck, math_golds

if TYPE_CHECKING:
    import datasets

    from kit.core.config.schema import DataConfig

TEXT_FORMATS = ("gsm8k", "boxed", "plain")  # whose answers a parser compares
ANSWER_FORMATS = (*TEXT_FORMATS, "countdown", *CODE_FORMATS, "any")
SUFFIXES = (".jsonl", ".parquet", ".json", ".jsonl.gz")
DICTIONARY = "dataset_dict.json"  # written by DatasetDict.save_to_disk: the names of its splits
SHOWN = 5  # bad rows listed in an error


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer. `id` is a hash of both, so it does not depend on the row order."""

    id: str
    question: str
    gold: str
    source: str  # "file:line" (or "hub-id[split]:row"), for error messages


@dataclass
class LoadReport:
    """Report of `read_problems`: rows read, unusable rows (place and reason), repeated questions."""

    rows: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line for the log."""
        return f"{self.rows:,} rows, {len(self.bad):,} bad, {len(self.duplicates):,} repeated questions"


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
    report = LoadReport()
    problems: list[Problem] = []
    seen: dict[str, Problem] = {}  # by question
    columns_checked = False
    for row in _rows(data, split):
        report.rows += 1
        if row.value is not None and not columns_checked:
            _check_columns(row, data)
            columns_checked = True
        problem, error = _problem(row, data)
        if problem is None:
            report.bad.append((row.source, error))
        elif (known := seen.setdefault(problem.question, problem)) is problem:
            problems.append(problem)
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
    return next((row.value for row in _rows(data, split) if row.value is not None), {})


def chat_messages(data: "DataConfig", problem: Problem) -> list[dict]:
    """The chat prompt of a problem: the system message if there is one, then the question with `prompt_suffix`.

    No chat template is applied here: the trainer and the server each apply it once.
    """
    return question_messages(problem.question, data.system_prompt, data.prompt_suffix)


def to_dataset(problems: list[Problem], data: "DataConfig") -> "datasets.Dataset":
    """A `datasets.Dataset` with columns prompt (chat messages), gold and problem_id, in the order of `problems`."""
    from datasets import Dataset

    if not problems:
        raise BadInput("no problems to train or evaluate on.")
    return Dataset.from_list(
        [{"prompt": chat_messages(data, p), "gold": p.gold, "problem_id": p.id} for p in problems],
    )


def prompt_lengths(problems: list[Problem], tokenizer: Tokenizer, data: "DataConfig") -> list[int]:
    """Prompt length of every problem in tokens, chat template and generation prompt included."""
    lengths = []
    for problem in problems:
        lengths.append(len(token_ids(tokenizer, chat_messages(data, problem), data.chat_template_kwargs)))
    return lengths


def drop_long(
    problems: list[Problem], tokenizer: Tokenizer, data: "DataConfig", max_prompt_length: int
) -> tuple[list[Problem], int]:
    """The problems whose prompt fits in `max_prompt_length` tokens, and how many were dropped.

    Prompts are never truncated: a truncated question has another answer. Raises `BadInput` if more than
    `max_bad_fraction` of them are too long.
    """
    lengths = prompt_lengths(problems, tokenizer, data)
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


def _problem(row: Row, data: "DataConfig") -> tuple[Problem | None, str]:
    """The problem of a row, or None and the reason."""
    if row.value is None:
        return None, row.error
    question_columns = _question_columns(row.value, data.question_column)
    for column in (*question_columns, data.answer_column):
        if column not in row.value:
            return None, f"no column {column!r}"
    parts, answer = [row.value[column] for column in question_columns], row.value[data.answer_column]
    for question in parts:
        if not isinstance(question, str) or not question.strip():
            return None, _no_question(question)
    question = _joined(parts)
    if data.answer_format in CODE_FORMATS:
        gold, error = gold_from_row(row.value, data.answer_format, data.answer_column)
    else:
        gold, error = extract_gold(answer, data.answer_format)
    if gold is None:
        return None, error
    if not _is_unicode(question + gold):
        return None, "an unpaired surrogate (half of a character), which no tokenizer reads"
    question = question.replace("\r\n", "\n").strip()
    if data.answer_format == "mbpp":
        question += shown_test(gold)
    digest = hashlib.blake2b(json.dumps([question, gold]).encode(), digest_size=8).hexdigest()
    return Problem(digest, question, gold, row.source), ""


def _no_question(value: Any) -> str:
    """Why the value of a question column is not a question."""
    if value is None or isinstance(value, str):
        return "the question is empty"
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        return (
            f"the question is a conversation of {len(value)} messages (TRL's conversational format), not text; write "
            "the user's message into a column of its own and the system message into data.system_prompt"
        )
    return f"the question is {_shortened(value)}, a {type(value).__name__} and not text"


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


def _rows(data: "DataConfig", split: str) -> Iterator[Row]:
    split_name = data.train_split if split == "train" else data.eval_split
    path = data.eval_path if split == "eval" and data.eval_path else data.path
    if split == "eval" and path == data.path and path and _is_one_split(Path(path).expanduser()):
        raise BadInput(
            f"data.path is the single file or saved data set {path}, which is what the run trains on. Name the "
            "held-out problems with data.eval_path, or set data.path to a directory holding "
            f"{data.train_split}.jsonl and {split_name}.jsonl."
        )
    if path:
        yield from _file_rows(_split_file(Path(path).expanduser(), split_name, split))
    elif data.id:
        yield from _hub_rows(data, split_name)
    else:
        raise BadInput("no data set is named: set data.id (a hub id) or data.path (a local file or directory).")


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
    return _is_one_split(entry) and (entry.is_dir() or entry.name.endswith(SUFFIXES)) and entry.name != DICTIONARY


def _file_rows(file: Path) -> Iterator[Row]:
    if file.is_dir():
        yield from _saved_rows(file)
    elif file.suffix == ".parquet":
        yield from _parquet_rows(file)
    elif file.suffix == ".json":
        yield from _json_rows(file)
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
        except (json.JSONDecodeError, RecursionError) as error:
            yield Row(source, None, f"invalid JSON: {error}")


def _lines(file: Path) -> Iterator[bytes]:
    # Split on \n alone: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    if file.suffix != ".gz":
        with open(file, "rb") as lines:
            yield from lines
        return
    try:
        with gzip.open(file, "rb") as lines:
            yield from lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadInput(f"{file} is not a whole gzip file: {error}") from None


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{file} is not JSON: {error}. One object per line belongs in a .jsonl file.") from None
    if not isinstance(rows, list):
        raise BadInput(f"{file} holds a {type(rows).__name__}, expected a list of objects.")
    for number, row in enumerate(rows, 1):
        yield _as_row(f"{file}:{number}", row)


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
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
    columns = [("question_column", name) for name in _question_columns(row.value, data.question_column)]
    for key, name in (*columns, ("answer_column", data.answer_column)):
        if name not in row.value:
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
