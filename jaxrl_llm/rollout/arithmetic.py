"""Built-in arithmetic: the first line of the answer must be exactly the number."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.registry import GRADERS
from jaxrl_llm.rollout.task import HELD_OUT, GeneratedTask, HashStream, Question, check_integer, register_task

__all__ = ["addition", "mixed", "multiplication", "subtraction"]

_VALUE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def _question(a: int, b: int, operation: str) -> Question:
    """`What is 76 + 30?`, with the assistant turn begun as `76 + 30 =`."""
    first, second = sorted((a, b)) if operation in "+*" else (a, b)  # same content in either order
    return Question(
        text=f"What is {a} {operation} {b}?",
        answer=str(_VALUE[operation](a, b)),
        prefix=f"{a} {operation} {b} =",
        key=f"{first} {operation} {second}",
    )


def _operands(stream: HashStream, digits: int, operation: str) -> tuple[int, int]:
    """Two numbers of exactly so many digits (0…9 for one); the larger first in a difference."""
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    a, b = stream.between(low, high), stream.between(low, high)
    return (max(a, b), min(a, b)) if operation == "-" else (a, b)


def _task(name: str, digits: int, operations: Sequence[str]) -> GeneratedTask:
    check_integer(name, "digits", digits, 1, 9)

    def draw(stream: HashStream) -> Question:
        operation = operations[0] if len(operations) == 1 else stream.choice(operations)
        return _question(*_operands(stream, digits, operation), operation)

    longest = 2 * digits if "*" in operations else digits + 1  # digits of an answer, at most one token each
    return GeneratedTask(
        name=name,
        draw=draw,
        grader=GRADERS["number"],
        max_tokens=max(8, longest + 3),
        held_out=0.3 if digits == 1 else HELD_OUT,  # 55 sums of one digit: a tenth would measure five of them
    )


@register_task("addition")
def addition(digits: int = 2) -> GeneratedTask:
    """Sums of two numbers of `digits` digits, such as 76 + 30 (8,100 different questions for two digits)."""
    return _task("addition", digits, "+")


@register_task("subtraction")
def subtraction(digits: int = 2) -> GeneratedTask:
    """Differences of two numbers of `digits` digits, never negative."""
    return _task("subtraction", digits, "-")


@register_task("multiplication")
def multiplication(digits: int = 2) -> GeneratedTask:
    """Products of two numbers of `digits` digits."""
    return _task("multiplication", digits, "*")


@register_task("mixed")
def mixed(digits: int = 2, operations: Sequence[str] = ("+", "-", "*")) -> GeneratedTask:
    """Sums, differences and products in equal shares."""
    if isinstance(operations, str) or not operations or any(o not in _VALUE for o in operations):
        raise InputError(f"task mixed: operations must be a list of some of + - *, got {operations!r}.")
    return _task("mixed", digits, tuple(operations))
