"""Finding answers in text: hand cases, and the cases R01, R02, R04 and R17."""

import time

import pytest

from jaxrl_llm.rewards import (
    GRADERS,
    after_thinking,
    answer_line,
    answer_tag,
    first_line,
    grade_boxed,
    grade_tag,
    last_boxed,
    think_answer_format,
)

# R01: balanced braces, escaped braces are text, an unclosed box is no answer.
R01 = [
    (r"so \boxed{\frac{3}{7}}", r"\frac{3}{7}"),
    (r"\boxed{\frac{\sqrt{5}}{2}}", r"\frac{\sqrt{5}}{2}"),
    (r"\boxed{\{1,\{2\}\}}", r"\{1,\{2\}\}"),
    (r"\boxed{\frac{1}{2", None),
    (r"\boxed{3} and then \boxed{4", None),
    (r"\boxed{\left\{ 1, 2 \right.} end", r"\left\{ 1, 2 \right."),
    (r"\boxed{x \} y}", r"x \} y"),
    (r"\boxed {5}", "5"),
    (r"\boxed{}", None),
    (r"\boxed{ }", None),
    (r"\boxed 5", None),
    (r"\boxedfoo{5}", None),
    (r"\boxed{5\\}", r"5\\"),
    ("\\boxed{5\\", None),
    ("no box { at } all", None),
    ("", None),
]


@pytest.mark.parametrize("text,expected", R01)
def test_r01_boxes_are_balanced(text, expected):
    assert last_boxed(text) == expected


def test_r01_an_unclosed_box_scores_zero_without_an_error():
    score = grade_boxed(r"\boxed{\frac{1}{2", r"\frac{1}{2}")
    assert score.value == 0.0 and "boxed" in score.reason


@pytest.mark.parametrize(
    "text,gold,expected",
    [
        (r"first \boxed{5}. Wrong; correcting: \boxed{7}.", "7", 1.0),
        (r"first \boxed{5}. Wrong; correcting: \boxed{7}.", "5", 0.0),
        (r"\boxed{840} ... \boxed{840}", "840", 1.0),
        (r"\boxed{3} and \boxed{4}", "4", 1.0),
        (r"\boxed{3} and \boxed{4}", "3", 0.0),
        (r"\boxed{3 or \boxed{4}}", "4", 1.0),
    ],
)
def test_r02_the_last_box_wins(text, gold, expected):
    assert grade_boxed(text, gold).value == expected


@pytest.mark.parametrize(
    "text,expected",
    [
        (r"<think> maybe \boxed{42} but no", 0.0),
        (r"<think>\boxed{42}</think> The answer is \boxed{41}", 0.0),
        (r"<think>\boxed{41}</think> \boxed{42}", 1.0),
        (r"<think>\boxed{1}</think> \boxed{42} </think> \boxed{41}", 0.0),
        (r"<think>\boxed{1}</think> \boxed{41} </think> \boxed{42}", 1.0),
        (r"<think>a</think> no box here", 0.0),
        (r"<think>a</think> hm <think> \boxed{42}", 0.0),
        (r"<THINK>\boxed{42}", 0.0),  # tags match whatever their case
        (r"<Think>\boxed{41}</THINK> \boxed{42}", 1.0),
        (r"<think>a</think> hm <THINK> \boxed{42}", 0.0),
        ("\u0130</Think> " + r"\boxed{42}", 1.0),  # a letter that is two when it is small
        (r"\boxed{42}", 1.0),  # a model that does not think is graded all the same
        (r"<thinking>\boxed{42}", 0.0),  # what other models write
        (r"<think >\boxed{42}", 0.0),
        (r"[THINK]\boxed{42}", 0.0),
        ("\u25c1think\u25b7" + r"\boxed{42}", 0.0),
        (r"<seed:think>\boxed{42}", 0.0),
        (r"<reasoning>\boxed{42}</reasoning>", 0.0),
        (r"[THINK]\boxed{41}[/THINK]\boxed{42}", 1.0),
        (r"<think>\boxed{41}</think >\boxed{42}", 1.0),
        (r"I think \boxed{42}", 1.0),
    ],
)
def test_r04_only_text_after_the_thinking_counts(text, expected):
    assert grade_boxed(text, "42").value == expected


def test_r04_thinking_that_the_prompt_opened():
    assert grade_boxed(r"so \boxed{42}", "42", thinking_opened=True).value == 0.0
    assert grade_boxed(r"hm</think>\boxed{42}", "42", thinking_opened=True).value == 1.0
    assert after_thinking("x", opened=True) is None
    assert after_thinking("<t>x</t>y", tags=("<t>", "</t>")) == "y"


@pytest.mark.parametrize(
    "text,form,answer",
    [
        ("<think>a</tool><answer>b</answer>", 0.0, "b"),
        ("<think>a</think><ANSWER>B</Answer>", 1.0, "B"),
        ("<think>a</think><THINK><answer>b</answer>", 0.0, "b"),
        ("<think>a</think><answer>b</answer>", 1.0, "b"),
        (" <think>\na\n</think>\n<answer> b </answer>\n", 1.0, "b"),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, "c"),
        ("<answer>b</answer><think>a</think>", 0.0, "b"),
        ("```\n<think>a</think><answer>b</answer>\n```", 0.0, None),
        ("<think>```\n<answer>x</answer>\n```</think><answer>b</answer>", 1.0, "b"),
        ("<think>a</think> so <answer>b</answer>", 0.0, "b"),
        ("<think>a</think><answer>b", 0.0, None),
        ("<think><answer>b</answer></think>", 0.0, "b"),
        ("</answer><answer>", 0.0, None),
        ("<answer></answer>", 0.0, ""),
        ("", 0.0, None),
    ],
)
def test_r17_format_needs_the_right_tags_once_and_in_order(text, form, answer):
    score = think_answer_format(text)
    assert score.value == form and 0.0 <= score.value <= 1.0
    assert bool(score.reason) == (form == 0.0)
    assert answer_tag(text) == answer


def test_r17_the_last_answer_is_used():
    text = "<think>a</think><answer>7</answer><answer>8</answer>"
    assert grade_tag(text, "8").value == 1.0
    assert grade_tag(text, "7").value == 0.0
    assert grade_tag("<think><answer>7</answer>", "7").value == 0.0
    assert grade_tag("```<answer>7</answer>```", "7").value == 0.0


@pytest.mark.parametrize(
    "text,line",
    [
        ("<think>a\nb</think>\n\n106\nx", "106"),
        (" <think>106</think>", ""),
        ("<think>106", ""),  # never closed
        ("106\n<think>a", "106"),
        ("106", "106"),
        ("\n106", ""),
    ],
)
def test_r04_the_first_line_is_that_of_the_answer(text, line):
    assert answer_line(text) == line
    assert GRADERS["number"].score(text, "106", "").value == float(line == "106")
    assert GRADERS["line"].score(text, "106", "").value == float(line == "106")


def test_first_line():
    assert first_line(" 106\nbut 107") == "106"
    assert first_line("\n106") == ""
    assert first_line("106\r\nx") == "106"
    assert first_line("") == ""


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 100_000, "{" * 300_000, "```" * 100_000, "<answer>" * 50_000, "\\" * 300_000]
)
def test_r11_extraction_is_linear(text):
    start = time.process_time()
    assert grade_boxed(text, "5").value == 0.0
    assert grade_tag(text, "5").value == 0.0
    assert think_answer_format(text).value == 0.0
    assert time.process_time() - start < 2.0
