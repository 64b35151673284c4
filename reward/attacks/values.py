r"""Attacks on the comparison: answers that look like the reference but differ in value, kind or script; and on its
cost: answers that would take forever. Each is boxed. The controls are other spellings of the same value. Both stand in
`answers.txt`, as lines `reference :: answer :: answer …`.
"""

from pathlib import Path

from reward.attacks import ANSWERS, MATH, OUTSIDE_BOX, Case, answer_table, sections

DIFFERENT, SAME, LOOSELY_SAME = map(answer_table, sections(Path(__file__).with_name("answers.txt")).values())


SCRIPTS = [
    # name, answer, reference, pays
    ("a superscript as a digit", "5²", "52", False),
    ("a superscript alone", "²", "2", False),
    ("a subscript as a digit", "5₂", "52", False),
    ("a struck-out digit", "7\u0336", "7", False),
    ("a zero-width space that joins digits", "1\u200b7", "7", False),
    ("a right-to-left mark that turns digits", "\u202e71", "17", False),
    ("a no-break space that joins digits", "7\u00a08", "78", False),
    ("a thin space before one digit", "7\u20098", "78", False),
    ("full-width digits of another number", "７８", "7", False),
    ("a minus that only Unicode has", "\u22127", "7", False),
    ("a full-width minus", "\uff0d7", "7", False),
    ("a fraction slash", "7\u20448", "7", False),
    ("a vulgar fraction for two digits", "½", "12", False),
    ("another vulgar fraction", "½", r"\frac{1}{3}", False),
    ("a Cyrillic letter for a Latin one", "\u0410", "B", False),
    ("a Greek letter for a Latin one", "\u0391", "B", False),
    ("an infinity for an eight", "∞", "8", False),
    ("pi for its digits", "π", "3.14", False),
    ("a Chinese number word of another value", "八", "7", False),
    ("a circled digit of another value", "⑧", "7", False),
    ("a Roman numeral character of another value", "Ⅷ", "7", False),
    ("digits of two scripts", "7٨", "7", False),
    ("an arrow", "8→7", "7", False),
    ("a logical or", "7∨8", "7", False),
    ("not equal as one character", "≠7", "7", False),
    ("at most as one character", "≤7", "7", False),
    ("a plus-minus as one character", "7±1", "7", False),
    ("Arabic-Indic digits", "٧", "7", True),
    ("full-width digits", "７", "7", True),
    ("bold mathematical digits", "𝟕", "7", True),
    ("a Unicode minus", "\u22127", "-7", True),
    ("a thin space before three digits", "10\u2009000", "10000", True),
    ("a Unicode times sign", "2×3", "6", True),
    ("a letter of another alphabet", r"\text{да}", r"\text{да}", True),
    ("accents", r"\text{Zürich}", r"\text{zürich}", True),
]

LOOKALIKE = [
    ("a box in full-width letters", "\uff3cboxed\uff5b7\uff5d"),
    ("a box with a Cyrillic letter", "\\b\u043exed{7}"),
    ("a box with full-width braces", "\\boxed\uff5b7\uff5d"),
]

EXPENSIVE = {
    "a tower of four": "9^{9^{9^{9}}}",
    "a tower of tens": "10^{10^{10}}",
    "a tower of twos": "2^{2^{2^{2^{2^{2}}}}}",
    "a power of a power": "(10^{10^{8}})^{10}",
    "a factorial": "(10^9)!",
    "a factorial of digits": "100000000!",
    "factorials of factorials": "((((9!)!)!)!)!",
    "a binomial": r"\binom{10^9}{5 \cdot 10^8}",
    "a sum": r"\sum_{k=1}^{10^{12}} \frac{1}{k}",
    "a product": r"\prod_{k=1}^{10^9} k",
    "a power to expand": "(x+1)^{100000}",
    "a multinomial to expand": "(a+b+c+d+f)^{400}",
    "an integral without a closed form": r"\int_0^1 e^{x^{x}} dx",
    "a limit": r"\lim_{n \to \infty} n^{n^{n}}",
    "nested roots": r"\sqrt{2+" * 400 + "2" + "}" * 400,
    "nested fractions": r"\frac{1}{1+" * 300 + "1" + "}" * 300,
    "nested sines": r"\sin(" * 300 + "1" + ")" * 300,
    "nested parentheses": "(" * 2000 + "7" + ")" * 2000,
    "nested braces": "{" * 2000 + "7" + "}" * 2000,
    "a long sum": "+".join("1" for _ in range(2000)),
    "a long alternating product": "(x-1)(x+1)" * 300,
    "a hundred variables": "".join(f"(x_{{{n}}}+1)" for n in range(100)),
    "a huge exponent": "1e999999999",
    "a tiny exponent": "1e-999999999",
    "a hundred thousand digits": "9" * 100_000,
    "four thousand digits to a power": "9" * 4000 + "^{9999}",
    "a million spaces": "7" + " " * 1_000_000 + "8",
    "a thousand minus signs": "-" * 1001 + "8",
    "a thousand words": r"\text{" + "and " * 1000 + "}",
    "a chain of slashes": "/".join("7" for _ in range(1000)),
    "a chain of equations": "=".join("x" for _ in range(1000)),
}

LONG = [
    # name, completion: the cost is in reading, not comparing; none of them states 7
    ("100,000 boxes that never close", "\\boxed{" * 100_000),
    ("100,000 hashes", "#### " * 100_000),
    ("100,000 braces", "{" * 100_000 + "}" * 100_000),
    ("a million backslashes", "\\" * 1_000_000),
    ("a million digits", "1" * 1_000_000),
    ("100,000 boxes, all wrong", "\\boxed{8} " * 100_000),
    ("a million dollars", "$" * 1_000_000),
]

CASES = [
    *(Case("comparison", "another value", rf"\boxed{{{answer}}}", gold) for answer, gold in DIFFERENT),
    *(Case("comparison", "another spelling", rf"\boxed{{{answer}}}", gold, True) for answer, gold in SAME),
    *(
        Case("comparison", "another spelling", rf"\boxed{{{answer}}}", gold, True, forms=OUTSIDE_BOX)
        for answer, gold in LOOSELY_SAME
    ),
    *(Case("unicode", name, rf"\boxed{{{answer}}}", gold, pays) for name, answer, gold, pays in SCRIPTS),
    *(Case("unicode", name, text, "7", tasks=("math", "gsm8k_strict")) for name, text in LOOKALIKE),
    *(Case("cost", name, rf"\boxed{{{answer}}}", "7") for name, answer in EXPENSIVE.items()),
    *(Case("cost", name, text, "7", tasks=ANSWERS) for name, text in LONG),
    Case("cost", "a power of moderate size", r"\boxed{2^{100}}", str(2**100), pays=True),
    Case("cost", "900 digits", rf"\boxed{{{'7' * 900}}}", "7" * 900, pays=True, tasks=ANSWERS),
    Case("cost", "an answer after 200,000 characters", "12 + 30 = 42. " * 15_000 + r"\boxed{7}", "7", True, ANSWERS),
    Case("cost", "a root", r"\boxed{\sqrt{10007}+1}", r"1+\sqrt{10007}", pays=True, tasks=MATH),
]
