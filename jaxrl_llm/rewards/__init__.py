"""Rewards: completion text -> Score. Pure, instant, thread-safe; nothing the policy wrote is evaluated."""

from jaxrl_llm.rewards.exact import first_line_exact, first_line_number, normalise
from jaxrl_llm.rewards.extract import after_thinking, answer_line, answer_tag, first_line, last_boxed
from jaxrl_llm.rewards.format import think_answer_format
from jaxrl_llm.rewards.math import answers_equal, grade_boxed, grade_tag
from jaxrl_llm.rewards.numbers import numbers_equal, parse_number
from jaxrl_llm.rewards.registry import GRADERS, Grader
from jaxrl_llm.rewards.score import Score

__all__ = [
    "GRADERS",
    "Grader",
    "Score",
    "after_thinking",
    "answer_line",
    "answer_tag",
    "answers_equal",
    "first_line",
    "first_line_exact",
    "first_line_number",
    "grade_boxed",
    "grade_tag",
    "last_boxed",
    "normalise",
    "numbers_equal",
    "parse_number",
    "think_answer_format",
]
