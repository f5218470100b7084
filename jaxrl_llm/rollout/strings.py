"""Built-in string tasks: the first line of the answer must be exactly the string or the count."""

from __future__ import annotations

from jaxrl_llm.rewards.registry import GRADERS
from jaxrl_llm.rollout.task import GeneratedTask, HashStream, Question, check_integer, register_task

__all__ = ["copy", "letter_count", "reverse"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _word(stream: HashStream, length: int, letters: str = _LETTERS) -> str:
    return "".join(stream.choice(letters) for _ in range(length))


@register_task("copy")
def copy(length: int = 4) -> GeneratedTask:
    """Repeat a random word of `length` letters."""
    check_integer("copy", "length", length, 2, 64)

    def draw(stream: HashStream) -> Question:
        word = _word(stream, length)
        return Question(
            text=f"Repeat the word {word}.", answer=word, prefix="The word is", key=f"copy {word}"
        )

    return GeneratedTask(name="copy", draw=draw, grader=GRADERS["line"], max_tokens=length + 4)


@register_task("reverse")
def reverse(length: int = 4) -> GeneratedTask:
    """Spell a random word of `length` letters backwards."""
    check_integer("reverse", "length", length, 2, 64)

    def draw(stream: HashStream) -> Question:
        word = _word(stream, length)
        return Question(
            text=f"Spell the word {word} backwards.",
            answer=word[::-1],
            prefix=f"{word} backwards is",
            key=f"reverse {word}",
        )

    return GeneratedTask(name="reverse", draw=draw, grader=GRADERS["line"], max_tokens=length + 4)


@register_task("letter_count")
def letter_count(length: int = 6) -> GeneratedTask:
    """How often a letter occurs in a random word of `length` letters out of five."""
    check_integer("letter_count", "length", length, 3, 64)

    def draw(stream: HashStream) -> Question:
        letters = "".join(stream.choice(_LETTERS) for _ in range(5))
        word = _word(stream, length, letters)
        letter = stream.choice(letters)
        return Question(
            text=f'How many times does the letter "{letter}" occur in "{word}"?',
            answer=str(word.count(letter)),
            prefix=f'"{letter}" in "{word}":',
            key=f"letter_count {letter} {word}",
        )

    return GeneratedTask(name="letter_count", draw=draw, grader=GRADERS["number"], max_tokens=8)
