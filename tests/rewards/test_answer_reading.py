"""What `math`, `numeric` and `contains` hear in an answer, row by row, and that each hears the reference answer itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.types import Message, Problem
from motet.rewards.graders.similarity import _METRICS
from motet.rewards.rewards import BUILTIN


def score(name: str, answer: str, completion: str, **args: object) -> float:
    """The score of a built-in reward."""
    return BUILTIN[name](Problem(0, (Message("user", "What?"),), answer, {"want": answer}), completion, **args)


MATH = [
    ("log 2", "2", 0),
    ("log 2", r"\boxed{\log 2}", 1),
    ("4 and 9", "9", 0),
    ("4 and 9", r"\boxed{4, 9}", 1),
    ("4 and 9", "9 and 4", 1),
    ("4, 9", "9, 4", 1),
    ("4, 9", "$4$ and $9$", 1),
    ("5 cos theta", "5", 0),
    ("5 cos theta", r"$5\cos\theta$", 1),
    ("2*pi", r"\boxed{2\pi}", 1),
    ("2*pi", "2π", 1),
    ("2*pi", "2", 0),
    ("3 1/2", r"\boxed{2}", 0),
    ("3 1/2", "3.5", 1),
    ("3 1/2", "7/2", 1),
    ("3 1/2", r"3\frac{1}{2}", 1),
    ("3 1/2", "1", 0),
    ("1", "3 1/2", 0),
    ("1.5e-3", "0.0015", 1),
    ("1.5e-3", r"1.5 \times 10^{-3}", 1),
    ("1.5e-3", "1.5", 0),
    ("1.5e-3", "1.5*10^-3", 1),
    ("1", "1e3", 0),
    ("1000", "1e3", 1),
    ("x^2+1", "x**2 + 1", 1),
    ("x^2+1", "$1+x^2$", 1),
    ("x^2+1", "1", 0),
    ("sqrt(2)", r"\sqrt{2}", 1),
    ("sqrt(2)", "2", 0),
    ("sqrt(2)", "√2", 1),
    ("pi/2", r"$\frac{\pi}{2}$", 1),
    ("(1,2)", "(1, 2)", 1),
    ("(1,2)", "(2,1)", 0),
    ("(1,2)", r"\boxed{(1,2)}", 1),
    ("A", "A", 1),
    ("A", r"\boxed{A}", 1),
    ("A", "B", 0),
    ("A", "The answer is A.", 1),
    ("A", "(A)", 1),
    ("A", "A, B, C or D", 0),
    ("2ab", "$2ab$", 1),
    ("2ab", "2", 0),
    ("(2)(3)", "6", 1),
    ("6", "(2)(3)", 1),
    ("5", "(2)(3)", 0),
    ("5!", "120", 1),
    ("120", "5!", 1),
    ("-1 1/2", "-1.5", 1),
    ("1.5e-8", "0", 0),
    ("1.5e-8", "0.00000002", 0),
    ("1.5e-8", "0.000000015", 1),
    ("0", "0.0", 1),
    ("x = 5", "5", 1),
    ("5", "x = 5", 1),
    ("12 cm", "12", 1),
    ("12 cm", "12 cm", 1),
    ("12 cm^2", "12 cm^2", 1),
    ("12 cm^2", r"\boxed{12}", 1),
    ("12 cm^2", "2", 0),
    ("12 cm^2", r"12\text{ cm}^2", 1),
    ("12 cm", "12 m", 0),
    ("12", r"\boxed{12 cm}", 1),
    ("12 cm", "The length is 12 cm.", 1),
    ("12 cm", "The length is 12 m.", 0),
    ("e^x", "exp(x)", 1),
    ("e^(2x)", "exp(2*x)", 1),
    ("ln(2)", r"\ln 2", 1),
    ("sin(x)^2", r"\sin^2 x", 1),
    ("2^10", "1024", 1),
    ("10^3", "1000", 1),
    ("10^-3", "0.001", 1),
    ("x<=3", r"x \le 3", 1),
    ("x>3", "3<x", 1),
    ("(-oo, 3)", r"(-\infty, 3)", 1),
    ("oo", r"\infty", 1),
    ("1/3", "0.333333", 1),
    ("1/3", "0.33", 0),
    ("50%", r"50\%", 1),
    ("50%", "0.5", 1),
    ("1,000", "1000", 1),
    ("1 000 000", "1000000", 1),
    ("[0, 1)", "[0,1)", 1),
    ("{1,2,3}", "{3,2,1}", 1),
    ("yes", "Yes.", 1),
    ("yes", "no", 0),
    ("The answer is 12.", r"\boxed{12}", 1),
    (r"so \boxed{7}", "I think it is 7", 1),
    ("12", "no idea", 0),
    ("北京", "北京", 1),
    ("٤٢", "42", 1),
    ("42", "٤٢", 1),
    ("42", "答案是42。", 1),
    ("42", "结果为42", 1),
    ("42", "It is definitely not 42.", 0),
    ("42", "Not 41 but 42", 1),
    ("42", "6*7=42", 1),
    ("42", "x = 6 * 7 = 42", 1),
    ("x^2 + 1", "1 + x^2", 1),
    ("3:4", "3/4", 1),
    ("a+b", "b+a", 1),
    ("ab", "b*a", 1),
    ("xy", "yx", 1),
    ("x is even", "x is even", 1),
    ("sqrt((x+1)^2+1)", r"\sqrt{(x+1)^2+1}", 1),
    ("sqrt2/2", r"\frac{\sqrt2}{2}", 1),
    ("2sqrt3", r"2\sqrt{3}", 1),
    ("3i", "3i", 1),
    ("2+3i", "3i+2", 1),
    (r"\text{Friday}", "Friday", 1),
    ("Friday", r"\boxed{\text{Friday}}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 1),
    ("90°", "90", 1),
    ("$5", "5", 1),
    ("5", r"\$5", 1),
    ("5", "$5$", 1),
    ("-5", "−5", 1),
    ("1/2", r"\frac12", 1),
    ("7", "17", 0),
    ("x", "y", 0),
    ("2x", "2", 0),
    ("log_2 8", "3", 1),
    ("5", "2 3", 0),
    ("1e3", "1000", 1),
    ("x=4, y=9", "x=4,y=9", 1),
    ("x^2y", "x^2y", 1),
    ("f(x)=x^2", "f(x)=x^2", 1),
    ("1.5×10^3", "1500", 1),
    ("2 pi", "2pi", 1),
    ("2x+3", "2x + 3", 1),
    ("theta", "θ", 1),
    ("a/b", r"\frac{a}{b}", 1),
    ("10 m/s", "10 m/s", 1),
    ("10 m/s", "10 km/h", 0),
    ("5 m/s^2", "5 m/s^2", 1),
    ("cos(2x)", "cos 2x", 1),
    ("|x|", r"\left|x\right|", 1),
    ("x²+1", "x^2+1", 1),
    ("½", "0.5", 1),
    ("3.0", "3", 1),
    ("5.", "5", 1),
    ("0.5", ".5", 1),
    ("2e", "2e", 1),
    ("2e3x", "2", 0),
    ("N/A", "N/A", 1),
    ("None", "None", 1),
    ("true", "True", 1),
    ("3 * 10^5", "3e5", 1),
    ("#### 12", "The answer is $12$", 1),
    ("42", "The answer is 42. I checked 3 times.", 1),
    ("4 or 9", "4", 0),
    ("16:30", "16:30", 1),
    ("16:30", "30", 0),
    ("2024-01-05", "5", 0),
    ("12", "12 apples", 1),
    ("12 apples", "12", 1),
    ("12 apples", "12 pears", 0),
]
NUMERIC = [
    ("3/4", "0.75", 1),
    ("3/4", "4", 0),
    ("3/4", "3/4", 1),
    ("3/4", "6/8", 1),
    ("3/4", "so 3/4.", 1),
    ("3/4", r"\frac{3}{4}", 1),
    (r"\frac{3}{4}", "0.75", 1),
    ("1 1/2", "1.5", 1),
    ("1 1/2", "3/2", 1),
    ("12 cm^2", "12", 1),
    ("12 cm^2", "12 cm^2", 1),
    ("12 cm^2", "The area is 12 cm^2.", 1),
    ("12 cm^2", "2", 0),
    ("12 cm^2", "12 cm^{2}", 1),
    ("12 cm^2", r"12\text{ cm}^2", 1),
    ("#### 42", "#### 42\nChecked 3 times.", 1),
    ("so 3 more #### 1,234", "1234", 1),
    ("a #### 42", "x 5 #### 42 and 3 more", 1),
    ("a #### 42", "#### 41\n42", 0),
    ("42", "first 41, then 42.", 1),
    ("x = 3/4", "0.75", 1),
    ("10^3", "10^3", 1),
    ("5%", "5", 1),
    ("$5", "5", 1),
    ("5 m/s^2", "5", 1),
    ("5 m/s^2", "it is 5 m/s^2", 1),
    ("12 m2", "12", 1),
    ("12 m2", "2", 0),
    ("٤٢", "٤٢", 1),
    ("٤٢", "42", 1),
    ("١٫٥", "1.5", 1),
    ("一共7个", "7", 1),
    ("4２", "42", 1),
    ("The answer is 12.", "12", 1),
    ("2 apples and 3 pears", "3", 1),
    ("-3", "x = -3", 1),
    ("3", "5-3", 1),
    ("1e500", "1e500", 1),
    ("-1/2", "-0.5", 1),
    ("42", "9e999999999", 0),
    ("1/2", "1/2 of 3", 0),
    ("5*3 = 15", "15", 1),
    ("7-3=4", "4", 1),
]
CONTAINS = [
    ("北京", "首都是北京。", 1),
    ("7", "答案是7个", 1),
    ("7", "17", 0),
    ("7", "第17个", 0),
    ("서울", "수도는 서울입니다.", 1),
    ("울", "서울", 0),
    ("東京", "東京です", 1),
    ("क", "कि", 0),
    ("दिल्ली", "राजधानी दिल्ली है।", 1),
    ("दिल्ल", "दिल्ली", 0),
    ("กรุงเทพ", "เมืองหลวงคือกรุงเทพครับ", 1),
    ("القاهرة", "العاصمة هي القاهرة.", 1),
    ("القاهرة", "القاهرةس", 0),
    ("42", "답은42입니다", 1),
    ("New York", "in new york!", 1),
    ("a+b", "so a+b", 1),
    ("cat", "concat", 0),
    ("café", "cafe\u0301 au lait", 1),
    ("cafe", "cafe\u0301", 0),
    ("7", "v7", 0),
    ("北京", "in北京city", 1),
    ("C++", "I like C++.", 1),
]
NO_SINGLE_NUMBER = ["10^3", "3:45", "2024-01-05", "2 + 3", "12-15", r"\sqrt{2}", "2*3", "1/2/2024"]
NO_MATHEMATICS = ["2 apples and 3 pears", "2 3", "hence n is prime, or not"]


@pytest.mark.parametrize(
    ("name", "answer", "completion", "expected"),
    [
        *(("math", *row) for row in MATH),
        *(("numeric", *row) for row in NUMERIC),
        *(("contains", *row) for row in CONTAINS),
    ],
)
def test_reward_hears_what_an_answer_says(name: str, answer: str, completion: str, expected: float) -> None:
    assert score(name, answer, completion) == expected


@pytest.mark.parametrize("answer", NO_SINGLE_NUMBER)
def test_numeric_refuses_an_expression_of_which_it_would_read_a_part(answer: str) -> None:
    assert score("numeric", answer, answer) == 1
    with pytest.raises(ValueError, match=r"is no single number:.*`math` or `exact`"):
        score("numeric", answer, "5")


@pytest.mark.parametrize("answer", NO_MATHEMATICS)
def test_math_refuses_a_sentence_of_which_it_would_read_a_part(answer: str) -> None:
    assert score("math", answer, answer) == 1
    with pytest.raises(ValueError, match=r"math-verify finds.*the reference answer"):
        score("math", answer, "3")


SCRIPTS = {
    "Latin": "abcxyzÀÉßñ", "Chinese": "北京上海是的", "Japanese": "東京にほんゴ", "Korean": "서울은각", "Thai": "กรุงเทพที่",
    "Arabic": "القاهرةبَ", "Devanagari": "दिल्लीकि", "Hebrew": "ירושלים", "Cyrillic": "Москва", "Greek": "Αθήνα",
    "Khmer": "ភ្នំពេញ", "Burmese": "နေပြည်တော်", "Tamil": "சென்னை", "mathematics": "x^2+1*()/π√{}\\$#",
}  # fmt: skip
DIGITS = "0123456789٠١٢३०१２３４"


@pytest.mark.parametrize("script", SCRIPTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_reward_passes_the_reference_answer_in_every_script(script: str, data: st.DataObject) -> None:
    letters = st.text(f"{SCRIPTS[script]}{DIGITS} .,'-", min_size=1, max_size=12)
    answer = data.draw(letters.filter(str.strip))
    for name in ("exact", "contains", "math"):
        assert score(name, answer, f" {answer}\n") == 1, name
    if any(map(str.isdecimal, answer)):
        assert score("numeric", answer, f"{answer}\n") == 1
    compared = {"input": "{{sample.output_text}}", "reference": "{{item.want}}"}
    for operation in ("eq", "like", "ilike"):
        assert score("grader", answer, answer, type="string_check", operation=operation, **compared) == 1
    for metric in _METRICS:
        assert score("grader", answer, answer, type="text_similarity", evaluation_metric=metric, **compared) == 1, (
            metric
        )


def test_rouge_knows_words_of_every_script() -> None:
    compared = {"input": "{{sample.output_text}}", "reference": "{{item.want}}", "type": "text_similarity"}
    for answer, completion in [
        ("the cat", "the dog"),
        ("кот спит", "кот ест"),
        ("北京", "北海"),
        ("दिल्ली है", "दिल्ली था"),
    ]:
        assert score("grader", answer, completion, evaluation_metric="rouge_1", **compared) == pytest.approx(0.5)
