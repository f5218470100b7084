"""Numbers and equality of answers: hand cases, and the cases R06, R09, R11 and R12."""

import asyncio
import concurrent.futures
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.rewards import (
    GRADERS,
    answers_equal,
    first_line_exact,
    first_line_number,
    grade_boxed,
    parse_number,
)
from jaxrl_llm.rewards.numbers import find_numbers, numbers_equal
from jaxrl_llm.rewards.score import Score


@pytest.mark.parametrize(
    "text,value",
    [
        ("5", 5),
        ("-5", -5),
        ("\u22125", -5),
        ("+5", 5),
        ("1,000", 1000),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1,00", None),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("1e-6", Fraction(1, 10**6)),
        ("2.5E3", 2500),
        ("1/3", Fraction(1, 3)),
        ("-6/4", Fraction(-3, 2)),
        ("1/0", None),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\dfrac{1}{2}", Fraction(1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{1}{0}", None),
        ("$5$", 5),
        (r"\(5\)", 5),
        (r"1{,}000", 1000),
        (r"10\,000", 10000),
        ("", None),
        (".", None),
        ("-", None),
        ("five", None),
        ("5 apples", None),
        ("1 2", None),
        ("\uff15", 5),  # full-width digit
        ("\u0663\u066b\u0665", Fraction(7, 2)),  # Arabic digits and decimal sign
        ("\u20134", -4),  # an en dash for a minus sign
        ("\u200b5\ufeff", 5),  # characters of no width
        ("2\u00bd", Fraction(5, 2)),  # one character for a fraction
        ("\u00bd", Fraction(1, 2)),
        ("1\u20442", Fraction(1, 2)),
        ("10\u00b3", None),  # not 103
        ("1'234'567", 1234567),
        ("1'23", None),
        (r"\text{5}", 5),
        (r"\mathbf{-5}", -5),
        (r"35\text{ percent}", Fraction(7, 20)),
        ("35\uff05", Fraction(7, 20)),
        (r"\frac{2}{-3}", Fraction(-2, 3)),
        (r"\frac{-2}{-3}", Fraction(2, 3)),
        (r"\frac{14}3", Fraction(14, 3)),
        (r"\frac2{3}", Fraction(2, 3)),
        (r"\frac{1.5}{2}", Fraction(3, 4)),
        ("2/-3", Fraction(-2, 3)),
        ("2 -1/3", None),
        ("2 1/-3", None),
        (r"2\frac{1}{-3}", None),
        ("2 0.5/3", None),
        (r"\frac{2}{0.0}", None),
        ("3~1/4", Fraction(13, 4)),
        (r"1.5\times10^{3}", 1500),
        (r"2 \cdot 10^{-3}", Fraction(1, 500)),
        ("6\u00d710^5", 600000),
        (r"-2 \times 10^2", -200),
        (r"1 \times 10^{9999}", None),
        ("10^{10^{10}}", None),
        ("10^10^10", None),
        ("11^2", None),
        ("1_000", None),
        ("nan", None),
        ("inf", None),
        ("1e999999999", None),
        ("9**9", None),
        ("10^2", 100),  # an exponent, not a computation
        ("9^2", None),
        ("3!", None),
        ("1 1/2/3", None),
        ("1 000", 1000),
        ("1\u2009000\u202f000", 10**6),
        ("1\u00a0000.5", Fraction(2001, 2)),
        ("-12 345", -12345),
        (r"12\ 345", 12345),
        ("1 00", None),
        ("1 0000", None),
        ("1234 567", None),
        ("0 500", None),
        ("0,500", None),  # not 500: half of the world writes a decimal comma
        ("1 2 345", None),
        ("12 345 67", None),
        ("1 000/3", None),
        (r"1\,2", None),
        (r"4\,10/3", None),
        (r"2\,1/2", Fraction(5, 2)),
    ],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "a,b,expected",
    [
        ("11 5/6", "71/6", True),
        ("2 2/3", "2", False),
        ("4 10/3", "10", False),
        (r"2\frac{1}{2}", "2.5", True),
        (r"-1\frac{2}{3}", "-5/3", True),
        ("-1 2/3", "-5/3", True),
        ("2 2/3", "2/3", False),
        (r"2 \frac{2}{3}", "8/3", True),
        ("7 1/2", "7.5", True),
    ],
)
def test_r06_mixed_numbers_in_both_orders(a, b, expected):
    assert answers_equal(a, b) is expected
    assert answers_equal(b, a) is expected
    assert grade_boxed(rf"\boxed{{{a}}}", b).value == float(expected)
    assert grade_boxed(rf"\boxed{{{b}}}", a).value == float(expected)


@pytest.mark.parametrize(
    "a,b,expected",
    [
        ("4 10/3", "410/3", False),
        ("2 3/3", "23/3", False),
        ("1 2", "12", False),
        ("3 14", "314", False),
        ("2 5/2", "25/2", False),
        ("4 100/3", "4100/3", False),
        ("1.5 5", "1.55", False),
        ("1 .5", "1.5", False),
        ("1. 5", "1.5", False),
        ("1 e5", "1e5", False),
        ("1, 234", "1,234", False),
        ("1$2", "12", False),
        (r"1\;2", "12", False),
        ("3 5%", "35%", False),
        ("x^2 3", "x^23", False),
        ("1 0 0 0", "1000", False),
        ("- 5", "-5", True),
        ("1 000", "1000", True),
        ("1\u2009000 m", "1000 m", True),
        ("1\u202f000", "1,000", True),
        ("(1, 200)", "(1,200)", True),
        ("1, 2, 3", "1,2,3", True),
        (r"2\sqrt{3} .", r"2 \sqrt{3}", True),
        (r"\frac 1 2 x", r"\frac12x", True),
        (r"\left( x , y \right)", "(x,y)", True),
        ("$5", "5", True),
        ("5 .", "5", True),
    ],
)
def test_white_space_joins_no_two_numbers(a, b, expected):
    assert answers_equal(a, b) is expected
    assert answers_equal(b, a) is expected


@pytest.mark.parametrize(
    "gold,answer,asked,expected",
    [
        ("35%", "35", False, False),
        ("35%", "35", True, True),
        ("35%", "0.35", False, True),
        ("35%", r"35\%", False, True),
        ("35%", "3.5", False, False),
        ("35%", "3.5", True, False),
        ("35%", "35 percent", False, True),
        ("35%", "35 per cent", False, True),
        ("0.5", r"50\%", False, True),
        ("50", "0.5", False, False),
        ("50", "0.5", True, False),
        ("100", r"100\%", False, False),
        ("1", r"100\%", False, True),
    ],
)
def test_r09_percent_policy_is_strict_and_symmetric(gold, answer, asked, expected):
    assert numbers_equal(gold, answer, percent_asked=asked) is expected
    assert numbers_equal(answer, gold, percent_asked=asked) is expected
    question = "What percentage is it?" if asked else "How much is it?"
    assert grade_boxed(rf"\boxed{{{answer}}}", gold, question=question).value == float(expected)


HOSTILE = [
    r"\boxed{9^{9^{9}}}",
    r"\boxed{9**9**9}",
    "9**9**9",
    r"\boxed{(10^9)!}",
    r"\boxed{5^{5^{5^{5^5}}}}",
    r"\boxed{" + "(" * 3000 + "5" + ")" * 3000 + "}",
    r"\boxed{" + "7" * 20000 + "}",
    r"\boxed{1e999999999}",
    r"\boxed{1/" + "9" * 150 + "e9999}",
    r"\boxed{" + r"\frac{" * 3000 + "1" + "}{2}" * 3000 + "}",
    r"\boxed{__import__('os').system('true')}",
    r"\boxed{" + r"\text{" * 3000 + "5" + "}" * 3000 + "}",
    r"\boxed{" + "(" * 9000 + "1," * 9000 + "}",
    r"\boxed{10^{10^{10}}}",
    r"\boxed{x=" + "x=" * 9000 + "5}",
    "<" * 50000 + " " * 50000,
]


def test_r11_hostile_answers_score_zero_at_once_and_the_rest_is_graded():
    start = time.process_time()
    batch = [rf"\boxed{{{i}}}" for i in range(100)] + HOSTILE
    scores = [grade_boxed(text, "5").value for text in batch]
    assert scores == [float(i == 5) for i in range(100)] + [0.0] * len(HOSTILE)
    for text in HOSTILE:
        for grader in GRADERS.values():
            assert grader.score(text, "5", "").value == 0.0
    assert time.process_time() - start < 2.0


def test_r11_equal_strings_may_be_equal():
    assert answers_equal("9^{9^{9}}", "9^{9^{9}}")
    assert not answers_equal("9^{9^{9}}", "9^{9^{8}}")


def test_r12_the_same_scores_in_threads_and_asyncio():
    cases = [(r"\boxed{2}", "2"), (r"\boxed{3}", "2"), (r"<think>\boxed{2}", "2")]
    expected = [1.0, 0.0, 0.0]

    def grade_all(_=None):
        return [grade_boxed(text, gold).value for text, gold in cases]

    assert grade_all() == expected
    inside: list = []
    thread = threading.Thread(target=lambda: inside.extend(grade_all()))
    thread.start()
    thread.join()
    assert inside == expected

    async def in_asyncio():
        return await asyncio.to_thread(grade_all)

    assert asyncio.run(in_asyncio()) == expected
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(grade_all, range(64))) == [expected] * 64


@pytest.mark.parametrize(
    "a,b,expected",
    [
        ("x=5", "5", True),
        (r"\theta = 5", "5", True),
        ("x = 1/2", "0.5", True),
        ("x=5", "y=5", False),  # both name a letter, and not the same
        ("x=5", "6", False),
        ("x==5", "5", False),
        (r"\{1,2\}", r"\{2, 1\}", True),  # a set has no order
        (r"\{1/2, 3\}", r"\{3, 0.5\}", True),
        (r"\{1,2\}", r"\{1,3\}", False),
        (r"\{1,2\}", "(1,2)", False),
        ("(1/2, 3)", "(0.5,3)", True),
        ("(1,2)", "(2,1)", False),  # a pair has one
        ("(1,2)", "[1,2]", False),
        ("(1,2]", r"\left( 1, 2 \right]", True),
        ("[(1,2),(3,4)]", "[(1,2),(3,4.0)]", False),  # only lists of numbers are read
        ("(1,2),(3,4)", "(1,2),(3, 4)", True),
        ("(A)", "A", True),
        ("B)", "B", True),
        (r"\text{(C)}", "C", True),
        ("(A)", "B", False),
        ("(a)", "a", False),
        ("AB", "A", False),
        ("x^{2}", "x^2", True),
        ("x^{12}", "x^12", False),  # which is x^1 followed by a 2
        (r"\sqrt5", r"\sqrt{5}", True),
        (r"90^\circ", r"90^{\circ}", True),
        (r"90^\circ", "90\u00b0", True),
        ("5 cm", "5", False),  # a unit is part of the answer
        (r"5\text{ cm}", "5 cm", True),
        (r"\text{yes}", "yes", True),
    ],
)
def test_forms_of_one_answer(a, b, expected):
    assert answers_equal(a, b) is expected
    assert answers_equal(b, a) is expected
    assert grade_boxed(rf"\boxed{{{a}}}", b).value == float(expected)


@given(st.text(max_size=40), st.text(max_size=40))
def test_equality_is_symmetric(a, b):
    assert answers_equal(a, b) == answers_equal(b, a)
    assert first_line_exact(a, b).value in (0.0, 1.0)


@given(
    st.text(alphabet="0123456789.,/\\frac{}()[] -+%e^$=x\u00bd\uff15", max_size=30),
    st.text(alphabet="0123456789./ %", max_size=12),
)
def test_equality_of_number_like_texts_is_symmetric(a, b):
    for asked in (False, True):
        assert answers_equal(a, b, percent_asked=asked) == answers_equal(b, a, percent_asked=asked)


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_read_back(value):
    assert parse_number(str(value)) == value


@pytest.mark.parametrize(
    "text,value,form,lenient",
    [
        (" 106", 1, 1, 1),
        ("106\n", 1, 1, 1),
        ("106\nand 107", 1, 1, 1),
        (" 107", 0, 1, 0),
        ("106.", 0, 0, 1),
        ("0106", 0, 0, 1),
        ("1060", 0, 1, 0),
        ("106 apples", 0, 0, 1),
        ("The sum is 106.", 0, 0, 1),
        ("\n106", 0, 0, 1),
        ("105 or 106", 0, 0, 1),
        ("-106", 0, 1, 0),
        ("1.06", 0, 0, 0),
        ("", 0, 0, 0),
        ("\uff11\uff10\uff16", 0, 0, 0),
    ],
)
def test_first_line_number_splits_format_from_skill(text, value, form, lenient):
    score = first_line_number(text, "106")
    assert (score.value, score.parts["format"], score.parts["lenient"]) == (value, form, lenient)


@pytest.mark.parametrize(
    "text,value,lenient",
    [
        (" cba\n", 1, 1),
        ("cba is it", 0, 1),
        ("cbad", 0, 0),
        ("CBA", 0, 0),
        ("", 0, 0),
        ("no: cba.", 0, 1),
    ],
)
def test_first_line_exact(text, value, lenient):
    score = first_line_exact(text, "cba")
    assert (score.value, score.parts["lenient"]) == (value, lenient)


def test_a_letter_and_its_accent_are_one_however_they_are_encoded():
    one, two = "caf\u00e9", "cafe\u0301"
    assert first_line_exact(one, two).value == first_line_exact(two, one).value == 1.0
    assert first_line_exact(f"a {one}.", two).parts["lenient"] == 1.0
    assert first_line_exact("cafe", one).value == 0.0
    assert answers_equal(rf"\text{{{one}}}", two) and not answers_equal(one, "cafe")


def test_an_empty_gold_is_never_matched():
    for grader in GRADERS.values():
        for text in ("", " ", "\n", r"\boxed{}", "<answer></answer>"):
            assert grader.score(text, "", "").value == 0.0


@pytest.mark.parametrize("name", sorted(GRADERS))
def test_every_grader_pays_for_what_it_writes_and_for_nothing_else(name):
    grader = GRADERS[name]
    assert grader.score(grader.write("37"), "37", "").value == 1.0
    assert grader.score(grader.write("38"), "37", "").value == 0.0
    assert grader.score("1 2 3 36 37 38", "37", "").value == 0.0


def test_numbers_in_text_stand_alone():
    assert find_numbers("x1 12a 3.5, -4 and 1,000") == [Fraction(7, 2), -4, 1000]
    assert len(find_numbers("1 " * 5000)) == 1000


def test_a_score_without_value_needs_a_reason():
    with pytest.raises(ValueError, match="reason"):
        Score(None)
    assert Score(None, reason="verifier crashed").value is None
