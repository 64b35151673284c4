r"""Attacks on the comparison: answers that look like the reference but differ in value, kind or script; and on its
cost: answers that would take forever. Each is boxed. The controls are other spellings of the same value.
"""

from reward.attacks import ANSWERS, MATH, OUTSIDE_BOX, Case, answer_table

DIFFERENT = answer_table(r"""
7 :: -7 :: 7.0001 :: 6.9999999999 :: 70 :: 7e1 :: 7+10^{-10} :: \sqrt{49}+10^{-8} :: 0x+8 :: \frac{7}{0}
\frac{1}{3} :: 0.333 :: 0.33333 :: 0.3333333343
\frac{1}{2006!} :: \frac{1}{2004!}
\frac{1}{2^{98}} :: \frac{1}{2^{99}}
e^{-101} :: e^{-100}
0 :: \frac{1}{60!} :: 10^{-9} :: \frac{1}{10^9} :: e^{-30} :: \text{NaN} :: \text{undefined}
\pi :: 3.14 :: 22/7
\sqrt{2} :: 1.41 :: \sqrt{3} :: 2\sqrt{2}
\frac{1}{2} :: 2 :: -\frac{1}{2}
x+2 :: x+1
(x-1)^2 :: x^2-1
x :: 2x :: y
7:23 :: 7:32
1:00 :: 12:00
1,6 :: 1,5
2.75 :: 2,750
100 :: 1 00
100000 :: 1 000 00
32349 :: 32, 349
2^{1/3} :: 2**(1/4)
16 :: 8**2
2.8 :: 28\text{ percent}
(5,7),(2,2) :: p=5,q=2;p=7,q=2
(1,2),(3,4) :: (1,2),(1,2)
5 :: 5x :: 50\% :: 5 million :: 5 dozen :: 5!
x^2 :: x^2+10^{-9}
(1, 2) :: (2, 1) :: (1, 2, 3) :: [1, 2]
(1, 2, 3) :: (1, 2)
\{1, 2, 3\} :: \{1, 2\} :: \{1, 2, 3, 4\}
1, 2, 3 :: 1, 2 :: 1, 2, 3, 4
[1, 2) :: (1, 2]
(-\infty, 2) :: (-\infty, 3) :: (-\infty, \infty)
(-\infty, 2) \cup (3, \infty) :: (-\infty, 2)
\{0\} :: \emptyset
\emptyset :: 0
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} :: \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} :: \begin{pmatrix} 1 & 2 \end{pmatrix} :: \begin{pmatrix} 1 \\ 3 \end{pmatrix}
\infty :: -\infty :: 10^{100}
i :: -i :: 1
3+2i :: 2+3i
\text{Monday} :: \text{Tuesday}
B :: A :: ABCD :: A, B :: (A) or (B)
yes :: no :: yes and no :: not yes
5\text{ m} :: 5\text{ cm}
0.5 :: 5\%
€5 :: \$5
12 :: 12_8 :: 1 2
1 :: 1{,}000 :: 0/0
1000 :: 1.000
3 :: 1 2
1,2 :: 12
\frac{5}{2} :: \binom{5}{2}
x = 1 :: x = 2
x = 1, x = 2 :: x = 1, x = 3
x > 2 :: x < 2 :: x \ge 2
x \ge 2 :: x \le 2
y = 2x :: y = 2x + 1
f(x) = x :: f(x) = 2x
3:4 :: 4:3
a_1 :: a_2
\vec{v} :: \vec{w}
90^\circ :: \frac{\pi}{3}
1024 :: 2^{11}
\cos x :: \sin x
\ln 3 :: \ln 2
x^3 :: x^2 + C
""")

SAME = answer_table(r"""
7 :: 7.0 :: +7
-7 :: -7
1000 :: 1,000 :: 1{,}000
1,000 :: 1000
0.5 :: \frac12 :: 50\%
\frac{1}{2} :: \dfrac{1}{2} :: 1/2
\frac{3}{2} :: 1\frac{1}{2}
5 :: \$5 :: 5\text{ cm} :: x=5
300 :: 3.0 \times 10^2
2\sqrt{2} :: \sqrt{8}
\frac{1}{\sqrt{2}} :: \frac{\sqrt{2}}{2}
x^2+2x+1 :: (x+1)^2
\pi \cdot 2 :: 2\pi
(1, 2) :: (1,2) :: \left(1, 2\right)
\{1, 2\} :: \{2, 1\}
(-\infty, 2] :: (-\infty,2]
\begin{pmatrix}1\\2\end{pmatrix} :: \begin{pmatrix} 1 \\ 2 \end{pmatrix}
Monday :: \text{Monday}
B :: (B) :: \text{B}
x=5 :: 5
-\frac{1}{2} :: \frac{-1}{2}
1024 :: 2^{10}
-2i+3 :: 3-2i
90 :: 90^\circ
yes :: Yes
2.5 :: \frac{10}{4}
32349 :: 32,\! 349
x \geq 5 :: x >= 5
S_1:S=7:32 :: 7:32
\sqrt[4]{2} :: 2**(1/4)
1000.99 :: 1,000.99€
28\% :: 28 percentage
(5,2),(7,2) :: p=5,q=2;p=7,q=2
""")

# Equal only under form "stated" or "lenient".
LOOSELY_SAME = answer_table(r"""
\frac{1}{12} :: 0.0833333333
2.75 :: 2,75
1000 :: 1 000
\frac{10}{9} :: \frac{10}{9} \approx 1.2
""")

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
