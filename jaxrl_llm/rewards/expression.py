"""Arithmetic written by a policy, evaluated without `eval`: + - * / and parentheses over integers."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["evaluate_expression"]

MAX_CHARS = 200
MAX_DIGITS = 9  # of one integer; with at most 200 characters every value stays small
_TOKEN = re.compile(r" *([0-9]+|[-+*/()])")
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the integers in it, in order; None if it is not one, or divides by 0.

    Read by an operator stack (no recursion), in exact rational arithmetic. Powers are not in the grammar.
    """
    text = text.strip().replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-")
    if not text or len(text) > MAX_CHARS:
        return None
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(match[1])
        at = match.end()
    values: list[Fraction] = []
    operators: list[str] = []
    numbers: list[int] = []
    operand_next = True
    try:
        for token in tokens:
            if token.isdigit():
                if not operand_next or len(token) > MAX_DIGITS:
                    return None
                numbers.append(int(token))
                values.append(Fraction(int(token)))
                operand_next = False
            elif token == "(":
                if not operand_next:
                    return None
                operators.append(token)
            elif token == ")":
                if operand_next:
                    return None
                while operators[-1] != "(":
                    _reduce(values, operators.pop())
                operators.pop()
            elif operand_next:
                if token != "-":
                    return None
                operators.append("negate")
            else:
                while operators and operators[-1] != "(" and _BINDS[operators[-1]] >= _BINDS[token]:
                    _reduce(values, operators.pop())
                operators.append(token)
                operand_next = True
        if operand_next:
            return None
        while operators:
            _reduce(values, operators.pop())
    except (IndexError, KeyError, ZeroDivisionError):  # unbalanced parentheses, or a division by zero
        return None
    return values[0], numbers


def _reduce(values: list[Fraction], operator: str) -> None:
    """Applies one operator to the top of the value stack."""
    if operator == "negate":
        values.append(-values.pop())
        return
    right, left = values.pop(), values.pop()
    if operator == "+":
        values.append(left + right)
    elif operator == "-":
        values.append(left - right)
    elif operator == "*":
        values.append(left * right)
    elif operator == "/":
        values.append(left / right)
    else:
        raise KeyError(operator)
