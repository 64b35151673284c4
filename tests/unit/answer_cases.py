"""Pairs (answer, reference) and texts that state an answer, by what a reward is to make of them: `answers.txt`.

A line is a reference, then answers to it or texts (⏎ is a line break), separated by ` :: `. They follow what public
answer checkers and their bug reports are about: is_equiv's normalization, tuples and intervals, Minerva's text
cleaning, percent and units, sympy's parsing traps. The answers of `reward attack` are among them.
"""

from pathlib import Path

from reward.attacks import answer_table, sections, values

_TABLES = {
    title: [(answer.replace("⏎", "\n"), gold) for answer, gold in answer_table(text)]
    for title, text in sections(Path(__file__).with_name("answers.txt")).items()
}
# What form "boxed" finds equal and different; the second of each only by math-verify.
EQUAL_HERE, EQUAL_THERE = _TABLES["equal"] + values.SAME, _TABLES["equal, left to math-verify"]
DIFFERENT_HERE, DIFFERENT_THERE = _TABLES["different"], _TABLES["different, left to math-verify"]
EQUAL_HERE += [(" 42. ", "42"), ("4\u200b2", "42"), ("10\u202f000", "10000"), ("1\u2009234\u2009567.5", "1234567.5")]
EQUAL_HERE += [("9" * 1200, "9" * 1200)]
DIFFERENT_HERE += [("10\u202f00", "1000"), ("1\u20090000", "10000"), ("", "5"), ("  ", "5")]
# Different to form "boxed": roundings that "stated" and "lenient" take, false arithmetic that "lenient" leaves out.
ROUNDED = _TABLES["equal unless the form is boxed"] + values.LOOSELY_SAME
CHAINED = _TABLES["equal if the form is lenient"]
EQUAL, DIFFERENT = EQUAL_HERE + EQUAL_THERE, DIFFERENT_HERE + DIFFERENT_THERE + values.DIFFERENT
# Texts: paid by "stated" and "lenient", by "lenient" alone, by neither.
STATED = _TABLES["paid if the form is stated or lenient"]
UNSTATED = _TABLES["paid if the form is lenient"]
NOT_AN_ANSWER = _TABLES["not an answer"]
