r"""Pairs of equal answers (`near_misses` has different ones), one a line: prediction, ` :: `, gold.

They follow what public answer checkers and their bug reports are about: is_equiv's normalization, tuples and
intervals, Minerva's text cleaning, percent and units, sympy's parsing traps.
"""


def pairs(text: str) -> list[tuple[str, str]]:
    """The (prediction, gold) pairs of a table."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith("# ")]
    return [tuple(part.strip() for part in line.split(" :: ")) for line in lines]


EQUAL_TEXT = r"""
# numbers
1,234 :: 1234
1{,}234 :: 1234
1\,234 :: 1234
10\,000\,000 :: 10000000
27,499 :: 27499
$1,000$ :: 1000
\$1{,}000 :: 1000
\$12.50 :: 12.5
$\$12.50$ :: 12.50
12.50 dollars :: \$12.50
\text{\$}5 :: 5
£7 :: 7
€7.00 :: 7
0.50 :: .5
.5 :: 0.5
5. :: 5
5.0 :: 5
007 :: 7
-.25 :: -\frac14
- 5 :: -5
+5 :: 5
−5 :: -5
３．５ :: 3.5
3.0\times 10^{8} :: 300000000
3 \cdot 10^8 :: 300000000
6.02e23 :: 6.02 \times 10^{23}
2.5 \times 10^{-3} :: 0.0025
1.2*10^3 :: 1200
10^{-3} :: 0.001
2^{10} :: 1024
2^10 :: 1024
5th :: 5
5^{\text{th}} :: 5
0.\overline{3} :: \frac{1}{3}
0.1\overline{6} :: \frac16
2.\overline{27} :: \frac{25}{11}
# percent
50\% :: 50
50% :: 0.5
50 percent :: 50\%
12.5\% :: 0.125
33\frac{1}{3}\% :: 33\frac13\%
\frac{1}{2} :: 50\%
# fractions
\frac{1}{2} :: 1/2
\dfrac{1}{2} :: \frac{1}{2}
\tfrac12 :: \frac{1}{2}
\frac12 :: 0.5
\frac1{2} :: \frac{1}{2}
\frac{1}2 :: \frac{1}{2}
\frac 1 2 :: \frac{1}{2}
\cfrac{3}{4} :: 0.75
{1 \over 2} :: \frac12
-\frac{3}{4} :: \frac{-3}{4}
\frac{3}{-4} :: -\frac{3}{4}
\frac{-3}{-4} :: \frac34
-3/4 :: -\frac{3}{4}
(-3)/4 :: -\frac34
6/8 :: \frac{3}{4}
\frac{14}{3} :: 4\frac{2}{3}
4 \frac{2}{3} :: \frac{14}{3}
4 2/3 :: \frac{14}{3}
-1\frac{1}{2} :: -\frac{3}{2}
½ :: \frac12
3⁄4 :: \frac34
\frac{\sqrt{3}}{2} :: \sqrt{3}/2
\frac{1}{\sqrt{2}} :: \frac{\sqrt{2}}{2}
\frac{x}{2} :: 0.5x
\left(\frac{1}{2}\right) :: \frac12
\frac{7}{1} :: 7
# roots and powers
\sqrt2 :: \sqrt{2}
\sqrt 2 :: \sqrt{2}
√2 :: \sqrt{2}
√(2) :: \sqrt2
2√3 :: 2\sqrt{3}
sqrt(2) :: \sqrt{2}
2sqrt(3) :: \sqrt{12}
\sqrt{8} :: 2\sqrt2
\sqrt{12} + \sqrt{27} :: 5\sqrt3
\sqrt[3]{16} :: 2\sqrt[3]{2}
\sqrt[3]{-8} :: -2
∛8 :: 2
2^{1/2} :: \sqrt2
8^{\frac{2}{3}} :: 4
x^{\frac{1}{2}} :: \sqrt{x}
\frac{9\sqrt{23}}{23} :: \frac{9}{\sqrt{23}}
\sqrt{3+2\sqrt{2}} :: 1+\sqrt2
\frac{1+\sqrt5}{2} :: \frac12+\frac{\sqrt{5}}{2}
\sqrt{\frac{2}{3}} :: \frac{\sqrt6}{3}
(\sqrt2+1)(\sqrt2-1) :: 1
\left(\sqrt{3}\right)^2 :: 3
11\sqrt2 :: 11\sqrt{2}
# pi, e, infinity
2π :: 2\pi
π/4 :: \frac{\pi}{4}
\frac{\pi}{4} :: \pi/4
\dfrac{3\pi}{2} :: \frac{3}{2}\pi
4\pi \text{ cm}^2 :: 4\pi
e^2 :: e^{2}
\infty :: ∞
-∞ :: -\infty
+\infty :: \infty
\mathrm{e}^{2} :: e^2
# units, degrees
5\text{ cm} :: 5
5 \mathrm{~cm} :: 5
5\,\text{cm} :: 5
5cm :: 5
5 cm :: 5\text{ cm}
5 \text{ inches} :: 5
12 \text{ square units} :: 12
24\text{ cm}^2 :: 24
24\text{ cm}^{2} :: 24
24 cm² :: 24
6 \sqrt{3} \text{ m} :: 6\sqrt3
60 mph :: 60
60 \text{ miles per hour} :: 60 mph
90^\circ :: 90
90^{\circ} :: 90
90° :: 90^\circ
90 degrees :: 90
\angle ABC = 90^\circ :: 90
45\degree :: 45
3 hours :: 3
2.5 \text{ kg} :: 2.5
18 apples :: 18
# variables and polynomials
x^2+2x+1 :: (x+1)^2
(x+1)(x-1) :: x^2-1
x(x+2) :: x^2+2x
2x+1 :: 1+2x
x^2 - 5x + 6 :: (x-2)(x-3)
x² + 1 :: x^2+1
-x^2+1 :: 1-x^2
3(x+y) :: 3x+3y
\frac{x+1}{2} :: \frac{x}{2}+\frac12
\frac{x^2-1}{x-1} :: x+1
\frac{1}{x}+\frac{1}{y} :: \frac{x+y}{xy}
a+b+c :: c+b+a
x^{-1} :: \frac{1}{x}
x_{1}+x_2 :: x_1+x_{2}
2 \cdot x :: 2x
2*x :: 2x
2 × 3 :: 6
xy :: yx
(a-b)^3 :: a^3-3a^2b+3ab^2-b^3
-(x-1) :: 1-x
\frac{-x+3}{2} :: -\frac{x-3}{2}
4x^{3}y^{2} :: 4y^2x^3
|x-1| :: |1-x|
\lvert x \rvert :: |x|
n(n+1)/2 :: \frac{n^2+n}{2}
2^{n+1} :: 2\cdot 2^n
4^x :: 2^{2x}
\theta :: θ
# functions
\sin^2 x + \cos^2 x :: 1
\tan x :: \frac{\sin x}{\cos x}
\sin(x) :: \sin x
sin(x) :: \sin x
\sin 2x :: 2\sin x\cos x
\cos 2x :: 1-2\sin^2 x
\sin \frac{\pi}{6} :: \frac12
\cos 60^\circ :: \frac{1}{2}
\sin^{-1} x :: \arcsin x
\sec x :: \frac{1}{\cos x}
\log_2 8 :: 3
\log_{10} 100 :: 2
\ln e :: 1
\ln 8 :: 3\ln 2
\ln 6 :: \ln 2+\ln 3
\log_2 3 :: \frac{\ln 3}{\ln 2}
\frac{\log 8}{\log 2} :: 3
e^{\ln 2} :: 2
\ln(x) :: \ln x
5! :: 120
\binom{5}{2} :: 10
\binom52 :: 10
\dbinom{n}{k} :: \binom{n}{k}
\frac{10!}{8!} :: 90
\lfloor 3.7 \rfloor :: 3
|-5| :: 5
\operatorname{arctan}(2) :: \arctan 2
# complex
3+4i :: 4i+3
(1+i)^2 :: 2i
\frac{1}{i} :: -i
\sqrt{-4} :: 2i
e^{i\pi} :: -1
3 + 4\mathrm{i} :: 3+4i
\frac{1+i}{1-i} :: i
e^{i \pi/2} :: i
# assignment and equations
x=5 :: 5
x = 5 :: x=5
5 :: x=5
x=\frac{1}{2} :: 0.5
f(x) = x^2 :: x^2
f(x)=2x+1 :: f(x) = 1+2x
y=2x+1 :: y = 2x + 1
y=2x+1 :: 2x+1
y - 2x = 1 :: y=2x+1
2x+3y=6 :: 4x+6y=12
3x - y - 5 = 0 :: y = 3x-5
x^2+y^2=25 :: y^2+x^2=25
5=x :: x=5
\text{Area} = 5 :: 5
a_n = 2n+1 :: 2n+1
S = 12\pi :: 12\pi
x = \frac{14}{2} = 7 :: 7
2+3=5 :: 5
\frac{10}{2}=5 :: 5
x=2\cdot 3=6 :: x=6
\sqrt2 \approx 1.414 :: \sqrt2
\frac{1}{3}\approx 0.333 :: \frac13
x \approx 3.14 :: 3.14
\approx 3.14 :: 3.14
y = \frac{1}{x} :: xy=1
# lists, sets, tuples
1, 2, 3 :: 1,2,3
1,2 :: 2,1
1 and 2 :: 1,2
1, 2, and 3 :: 1,2,3
1 \text{ and } 2 :: 1,2
1 \text{ or } 2 :: 1, 2
2 or -2 :: -2, 2
\{1,2\} :: \{2,1\}
\{1,2,3\} :: 1,2,3
1;2 :: 1,2
\{1,1,2\} :: \{1,2\}
\left\{ 1, \frac12 \right\} :: \{0.5, 1\}
{1,2} :: \{1,2\}
x=1, x=2 :: 1, 2
x = 1 \text{ or } x = 2 :: 1,2
x=1,2 :: x=2, x=1
x=1, y=2 :: y=2, x=1
x=1, y=2 :: (1,2)
(x,y)=(1,2) :: (1,2)
(1,2) :: (1, 2)
\left(1,2\right) :: (1,2)
(\frac12, 3) :: (0.5, 3)
(1, 2, 3) :: (1,2,3)
(\sqrt{8}, \frac{\pi}{2}) :: (2\sqrt2, \pi/2)
(1,2), (3,4) :: (3,4), (1,2)
(1,2) and (3,4) :: (1,2),(3,4)
\langle 1, 2 \rangle :: (1,2)
(r,\theta) = (3, \frac{\pi}{2}) :: \left(3,\frac{\pi}{2}\right)
\{(1,2),(2,1)\} :: \{(2,1),(1,2)\}
\{5\} :: 5
\{\} :: \emptyset
\varnothing :: \emptyset
∅ :: \emptyset
1,234, 5,678 :: 1234, 5678
\pm 2 :: 2,-2
±2 :: \pm 2
x=\pm 2 :: -2, 2
1\pm\sqrt{2} :: 1+\sqrt2, 1-\sqrt2
\frac{-1 \pm \sqrt{5}}{2} :: \frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}
3, -3 :: \pm 3
2 \pm 3i :: 2+3i, 2-3i
# intervals and inequalities
[0,1) :: [0, 1)
(-\infty, 3] :: (-\infty,3]
(-∞,3] :: (-\infty,3]
\left(-\infty,3\right] :: (-\infty, 3]
x \le 3 :: (-\infty, 3]
x \in (-\infty,3] :: (-\infty,3]
(-\infty,3] :: x\leq 3
x>5 :: (5,\infty)
5<x :: x>5
x ≥ 2 :: x \geq 2
0 \leq x < 1 :: [0,1)
[0,1) :: 0\le x<1
(1,2) :: 1<x<2
1 > x > 0 :: 0<x<1
(-\infty,1)\cup(2,\infty) :: (2,\infty) \cup (-\infty,1)
(-∞,1)∪(2,∞) :: (-\infty,1)\cup(2,\infty)
x<1 \text{ or } x>2 :: (-\infty,1)\cup(2,\infty)
(-\infty,\infty) :: \mathbb{R}
ℝ :: \mathbb{R}
x \in \mathbb{R} :: (-\infty,\infty)
\text{all real numbers} :: \mathbb{R}
(-\infty,1)\cup(1,\infty) :: x \neq 1
]0,1[ :: (0,1)
[0, 2\pi) :: [0,2π)
x\geqslant 2 :: [2,\infty)
[-\frac12, 0.5] :: [-0.5,\frac12]
-x \ge 1 :: x\le -1
# matrices
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{bmatrix}1&2\\3&4\end{bmatrix} :: \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1/2\\0\end{pmatrix} :: \begin{pmatrix}0.5\\0\end{pmatrix}
\begin{pmatrix} \frac{1}{2} & \sqrt{8} \end{pmatrix} :: \begin{pmatrix} 0.5 & 2\sqrt2\end{pmatrix}
\begin{pmatrix}1\\2\\\end{pmatrix} :: \begin{pmatrix}1\\2\end{pmatrix}
\left(\begin{matrix}1\\2\end{matrix}\right) :: \begin{pmatrix}1\\2\end{pmatrix}
# text and choices
\text{(B)} :: B
(B) :: B
B. :: B
\textbf{(B)} :: (B)
\mathrm{B} :: B
B) 5 :: B
(C) 12 :: C
\text{(D)}\ 5 :: (D)
\text{east} :: east
\text{Monday} :: monday
\text{Yes} :: yes
\text{no solution} :: no solution
\text{ even } :: even
\mathrm{ellipse} :: \text{ellipse}
William :: \text{William}
6:30 :: 6:30
3:2 :: 3 : 2
# bases
12_8 :: 12_{8}
1010_{2} :: 1010_2
(52)_8 :: 52_8
2A_{16} :: 2a_{16}
101_{\text{two}} :: 101_2
# punctuation and wrapping
42. :: 42
$42$. :: 42
\(42\) :: 42
\[ 42 \] :: 42
**42** :: 42
{42} :: 42
\text{42} :: 42
\displaystyle \frac12 :: \frac12
x = 42, :: 42
\bigl(1,2\bigr) :: (1,2)
\frac{1}{2}. :: 0.5
\boldsymbol{x} :: x
# a second round
$\boxed{5}$ :: 5
\frac{1}{2}\text{ hour} :: \frac12
10\text{ units}^2 :: 10
100 \text{ square feet} :: 100
\text{$5$} :: 5
x=2,\ y=3 :: x=2, y=3
(2,\ 3) :: (2,3)
\left(2, \, 3\right) :: (2,3)
\left\{2,3\right\} :: \{2, 3\}
a=1, b=2, c=3 :: (1,2,3)
x = 2 \quad \text{or} \quad x = 3 :: 2, 3
x_1 = 2, x_2 = 3 :: 2,3
x = -1 \pm \sqrt{3} :: -1+\sqrt3, -1-\sqrt3
-1 \pm i\sqrt{3} :: -1+\sqrt{3}i, -1-\sqrt{3}i
\frac{3 \pm \sqrt{17}}{4} :: \frac{3}{4} \pm \frac{\sqrt{17}}{4}
k\pi, k \in \mathbb{Z} :: k\pi
n\pi, n\in\mathbb{Z} :: n\pi, \quad n \in \mathbb{Z}
\frac{\pi}{2} + 2k\pi :: \frac{\pi}{2}+2\pi k
[-2, \infty) :: x \geq -2
y \le \frac{1}{2} :: \left(-\infty, \frac12\right]
\{x \mid x > 3\} :: (3,\infty)
\{x : x > 3\} :: x>3
\{x \in \mathbb{R} : x \neq 2\} :: x \ne 2
\mathbb{R} \setminus \{2\} :: (-\infty,2)\cup(2,\infty)
x \in (-\infty, -1) \cup (1, \infty) :: (-\infty,-1) \cup (1,\infty)
-3 < x \text{ and } x < 2 :: -3<x<2
3.00 \times 10^4 :: 30000
30{,}000 :: 30000
1.50 :: \frac{3}{2}
\$1,234.50 :: 1234.5
5 USD :: \$5
75\text{ percent} :: 75\%
0.75 :: 75\%
2^{3}\cdot 3 :: 24
2^3 \times 3^2 :: 72
3^{2x} :: 9^x
\frac{2}{\sqrt{5}} :: \frac{2\sqrt{5}}{5}
\frac{\sqrt[3]{4}}{2} :: \frac{1}{\sqrt[3]{2}}
\sqrt{50} :: 5 \sqrt{2}
\log_{3}{9} :: 2
\log_{10}(1000) :: 3
\lg 100 :: 2
\frac{\ln 9}{\ln 3} :: 2
\arctan(1) :: \frac{\pi}{4}
\tan^{-1}(2) :: \arctan 2
\int_0^1 x\,dx :: \frac12
\sum_{k=1}^{4} k :: 10
\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} :: \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
\begin{pmatrix} 1 \\ -2 \\ 3 \end{pmatrix} :: \begin{pmatrix} 1\\ -2\\ 3\end{pmatrix}
\left[\begin{array}{cc}1&2\\3&4\end{array}\right] :: \begin{pmatrix}1&2\\3&4\end{pmatrix}
(A) :: \text{A}
\text{A} :: A
\boxed{A} :: A
Option A :: A
\text{True} :: true
\text{ No} :: no
\text{Evelyn} :: Evelyn
\text{odd} :: odd
10^{\circ}\text{C} :: 10
72^\circ :: 72^{\circ}
2\text{ m/s} :: 2
9.8 \text{ m/s}^2 :: 9.8
p - q :: -q + p
-\frac{1}{x} :: \frac{-1}{x}
\frac{x}{x+1} :: 1-\frac{1}{x+1}
x^3-1 :: (x-1)(x^2+x+1)
\frac{(x+1)^2}{(x+1)} :: x+1
2(l+w) :: 2l+2w
\pi r^2 :: r^2\pi
\frac{4}{3}\pi r^3 :: \frac{4\pi r^3}{3}
f(x)=\frac{1}{x} :: \frac1x
y = -2x + 3 :: 2x + y = 3
y = -2x + 3 :: 2x+y-3=0
\frac{x^2}{4}+\frac{y^2}{9}=1 :: 9x^2+4y^2=36
(x-1)^2+(y-2)^2=25 :: (x - 1)^2 + (y - 2)^2 = 5^2
A \cup B :: A\cup B
120 \text{ ways} :: 120
6 \text{ and } 8 :: 6,8
6, \text{ and } 8 :: 6, 8
3:4 :: 3:4
\frac{1}{2},\frac{1}{3} :: \frac13, \frac12
0.\overline{142857} :: \frac{1}{7}
0.\dot{3} :: \frac13
e^{-x} :: \frac{1}{e^x}
\sqrt{x}\sqrt{y} :: \sqrt{y}\sqrt{x}
1{,}000{,}000 :: 10^6
-0 :: 0
{5 \choose 2} :: 10
\text{Friday}. :: Friday
\dfrac{\pi}{6}\text{ radians} :: \frac{\pi}{6}
13\,\text{cm} :: 13\text{ cm}
\text{13 cm} :: 13
\textbf{13} :: 13
\mathbf{13} :: 13
\$\,5 :: 5
\frac{5}{1} \text{ cm} :: 5
"""

EQUAL = pairs(EQUAL_TEXT)
