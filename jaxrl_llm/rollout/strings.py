"""Built-in string tasks: the first line of the answer must be exactly the string or the count (`vowel` apart)."""

from __future__ import annotations

from jaxrl_llm.rewards.registry import GRADERS, Grader
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.task import GeneratedTask, HashStream, Question, check_integer, register_task

__all__ = ["copy", "letter_count", "reverse", "vowel"]

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


def _vowel_score(completion: str, gold: str, question: str) -> Score:
    del gold, question  # any vowel will do
    first = completion[:1]
    right = first != "" and first in "aeiou"
    parts = {"format": float(first.isalpha()), "lenient": float(any(c in "aeiou" for c in completion))}
    return Score(float(right), parts, "" if right else f"begins with {first!r}, not with a vowel")


@register_task("vowel")
def vowel(length: int = 3) -> GeneratedTask:
    """Go on with a vowel after a random word. A random policy is right often enough to learn it in seconds:
    it tests the machinery, not a model."""
    check_integer("vowel", "length", length, 2, 64)

    def draw(stream: HashStream) -> Question:
        word = _word(stream, length)
        return Question(text=f"{word} and a vowel", answer="a", key=f"vowel {word}")

    grader = Grader(
        find=lambda text: text[:1], score=_vowel_score, write=lambda answer: answer, instruction=""
    )
    return GeneratedTask(name="vowel", draw=draw, grader=grader, max_tokens=2, stop=(), exact=False)
