"""Pairs of answers that differ, in the form of `answer_cases`: what a lenient checker pays."""

from tests.unit.answer_cases import pairs

DIFFERENT_TEXT = r"""
# numbers
1234 :: 1,235
12,34 :: 1234
0.3333 :: \frac13
0.33 :: \frac{1}{3}
3.14 :: \pi
3.1416 :: 3.14159
1.414 :: \sqrt2
2.7 :: e
-5 :: 5
0.05 :: 0.5
1e3 :: 1e4
3\times10^8 :: 3\times10^7
10^3 :: 10^{-3}
5\% :: 0.5
0.005 :: 50\%
50 :: 5\%
5\frac12 :: \frac52
2\frac{1}{3} :: \frac{2}{3}
\frac{3}{4} :: \frac{4}{3}
\frac12 :: 12
\frac{1}{2} :: 1,2
0.\overline{3} :: 0.3
5! :: 5
5!! :: 120
2^{10} :: 2^{11}
2^10 :: 20
123456789012345678 :: 123456789012345679
# roots and powers
\sqrt2 :: \sqrt3
\sqrt{12} :: 2\sqrt2
2\sqrt3 :: 3\sqrt2
\sqrt[3]{2} :: \sqrt2
-\sqrt2 :: \sqrt2
\sqrt{3+2\sqrt2} :: 1+\sqrt3
x^{1/2} :: x^2
2^{n+1} :: 2^{n}+1
\sqrt{x+1} :: \sqrt{x}+1
# symbols
x :: y
x+1 :: x
2x :: x^2
x^2+1 :: (x+1)^2
(x+1)(x-1) :: x^2+1
a-b :: b-a
\frac{a}{b} :: \frac{b}{a}
x_1 :: x_2
\frac{1}{x}+\frac1y :: \frac{2}{x+y}
1/2x+1 :: 2x+1
|x| :: x
\sin x :: \cos x
\sin^2 x :: \sin x^2
\sin 2x :: 2\sin x
\ln(x+1) :: \ln x+1
\ln 2 :: \log_{10} 2
\ln(x^2) :: \ln x
\binom{5}{2} :: \binom{5}{1}
\frac{5}{2} :: \binom{5}{2}
e^x :: x^e
i :: 1
1+i :: 1-i
e^{i\pi} :: 1
# units
5 m :: 5 cm
5\text{ hours} :: 5\text{ minutes}
5 ft :: 5 \text{ ft}^2
\$5 :: 5\text{ euros}
90^\circ :: \frac{\pi}{2}
5 \text{ million} :: 5
5 thousand :: 5
# equations
y=5 :: x=5
4=5 :: 5
x=4=5 :: 5
1=2=5 :: 5
x+1=5 :: 5
2x=10 :: 5
\frac{10}{2}=6 :: 6
2+3=6 :: 6
2+3=5=6 :: 6
x=2=3 :: x=3
y=2x+1 :: y=2x-1
2x+3y=6 :: 2x+3y=7
x=x+1 :: y=y+1
x^2=4 :: x=2
4 \approx 5 :: 5
4 \approx 5 :: 4
100 \approx 101 :: 101
\sqrt2 \approx 1.5 :: \sqrt2
x \neq 5 :: 5
x > 5 :: 5
x \geq 5 :: x>5
5 \equiv 2 \pmod 3 :: 2
# lists, sets, tuples
1,2 :: 1
1 :: 1,2
1,2,3 :: 1,2
1,2 :: 1,3
(1,2) :: (2,1)
(1,2) :: \{1,2\}
\{1,2\} :: (1,2)
(2,1) :: 1,2
[1,2] :: (1,2)
(1,2) :: [1,2]
\{1,2\} :: \{1,2,3\}
\{1,2\} :: \{1,3\}
1,1,2 :: 1,2
x=1,y=2 :: x=2,y=1
x=1,y=2 :: (2,1)
x=1, y=2 :: x=1, z=2
(1,2),(3,4) :: (1,3),(2,4)
(1,2,3) :: (1,2)
(1,2) :: 1.2
\{0\} :: \emptyset
0 :: \emptyset
\pm 2 :: 2
2 :: \pm 2
1\pm\sqrt2 :: 1+\sqrt2
2\pm1 :: 2,1
5 or 6 :: 5
5, 6 :: 5
5 and 6 :: 6
5 \text{ or } 6 :: 6
5;6 :: 5
10, 5 :: 105
1,2,3,4,5 :: 12345
# intervals
[0,1) :: (0,1)
[0,1] :: [0,1)
(0,1) :: (0,2)
(-\infty,3) :: (-\infty,3]
(-\infty,3) :: (3,\infty)
(-\infty,3] :: [-\infty,3)
x<3 :: x\le 3
x<3 :: x>3
x<3 :: (3,\infty)
x>3 :: y>3
1<x<2 :: 1\le x<2
1<x<2 :: (1,2]
(-\infty,1)\cup(2,\infty) :: (-\infty,1]\cup(2,\infty)
(-\infty,1)\cup(2,\infty) :: (1,2)
(-\infty,1) :: (-\infty,1)\cup(2,\infty)
\mathbb{R} :: \mathbb{Z}
x\neq 1 :: x\neq 2
x \neq 1 :: \mathbb{R}
(0,\infty) :: [0,\infty)
1,2 :: [1,2]
# matrices
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} :: \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} :: \begin{pmatrix}2\\1\end{pmatrix}
\begin{vmatrix}1&2\\3&4\end{vmatrix} :: \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: 1,2,3,4
# text
A :: B
(A) :: (B)
A or B :: A
A, B :: A
(A) 5 or (B) 6 :: B
\text{no} :: \text{on}
\text{east} :: \text{west}
even :: odd
\text{evens} :: \text{even}
yes :: no
not B :: B
5 :: five
\text{Monday or Tuesday} :: \text{Monday}
6:30 :: 6:03
3:2 :: 2:3
# bases
12_8 :: 12_9
12_8 :: 12
12 :: 12_8
12_8 :: 10
101_2 :: 101_{10}
# hacks
__import__('os') :: 5
\boxed :: 5
x :: 5
1/0 :: 5
\infty :: 5
nan :: 5
0 :: 5
5x :: 5
5 5 :: 5
5.5.5 :: 5
5 \neq 5 :: 5
\text{the answer} :: 5
# a second round
\frac{1}{2}, 3 :: \frac{1}{2}
3, \frac{1}{2} :: \frac{1}{2}
\{x \mid x > 3\} :: (3,4)
\{x : x > 3\} :: x\ge 3
(3,\infty) :: (-\infty, 3)
\mathbb{R} \setminus \{2\} :: \mathbb{R}
k\pi :: 2k\pi
\frac{\pi}{2}+k\pi :: \frac{\pi}{2}+2k\pi
x=-1\pm\sqrt3 :: 1\pm\sqrt3
100 \text{ square feet} :: 100 \text{ cubic feet}
75 :: 0.075
\frac{2}{\sqrt5} :: \frac{\sqrt5}{2}
\log_3 9 :: 3
\log_2 8 :: \log_3 8
\lg 100 :: \ln 100
\arctan 1 :: \frac{\pi}{3}
\tan^{-1}(2) :: \frac{1}{\tan 2}
\sin^{-1} x :: \frac{1}{\sin x}
\int_0^1 x\,dx :: \frac13
\int_0^2 x\,dx :: \int_0^1 x\,dx
\sum_{k=1}^{4} k :: 11
\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} :: \begin{bmatrix} 0 & 1 \\ 1 & 0 \end{bmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: \begin{pmatrix}1&2&3&4\end{pmatrix}
\left[\begin{array}{cc}1&2\\3&4\end{array}\right] :: \begin{pmatrix}1&2\\3&5\end{pmatrix}
Option A :: B
not A :: A
\text{True} :: false
10^{\circ}\text{C} :: 10^{\circ}\text{F}
2\text{ m/s} :: 2\text{ km/h}
\frac{x}{x+1} :: \frac{x+1}{x}
y=-2x+3 :: 2x-y=3
(x-1)^2+(y-2)^2=25 :: (x-1)^2+(y-2)^2=5
(x-1)^2+(y+2)^2=25 :: (x-1)^2+(y-2)^2=25
x^2+y^2 :: x^2+y^2=1
x^2+y^2=1 :: x^2+y^2
6 \text{ and } 8 :: 68
3:4 :: 3/4+1
0.\overline{142857} :: 0.142857
e^{-x} :: -e^x
\sqrt{xy} :: x\sqrt{y}
1 000 000 :: 1000
1 000 :: 1
C(5,2) :: 52
5C2 :: 52
P(5,2) :: 10
5\mathrm{i} :: 5
5i :: 5
5e :: 5
5\text{x} :: 5
5\mathrm{e} :: 5
5\mathrm{d} :: 5
5\text{ or more} :: 5
\text{at least } 5 :: 5
\text{about } 5 :: 5
5\text{ to }6 :: 5
5-6 :: 5
5\sim6 :: 5
5\text{ (mod 7)} :: 5
\sqrt{5} \text{ or } 5 :: 5
5 \to 6 :: 5
5 \implies 6 :: 6
5|6 :: 5
(5) (6) :: 30.0001
(5) :: 6
[5] :: 6
\lfloor 5.5 \rfloor :: 5.5
|x|=5 :: 5
x^2=25 :: 5
\sqrt{25}=4 :: 5
\min(5,6) :: 6
\max(5,6) :: 5
5,000 :: 5
5.000 :: 5000
1/3 :: 0.333333333333333333333
0.1+0.2 :: 0.30000000000000004
10^{20}+1 :: 10^{20}
2^{100} :: 2^{100}+1
\sqrt{10^{20}+1} :: 10^{10}
\pi :: \frac{355}{113}
e^{\pi\sqrt{163}} :: 262537412640768744
\frac{1}{10^{8}} :: 0
10^{-10} :: 0
x+10^{-9} :: x
1.0000001 :: 1
1.0000001\pi :: \pi
\sqrt{2}+10^{-8} :: \sqrt2
"""

DIFFERENT = pairs(DIFFERENT_TEXT)
