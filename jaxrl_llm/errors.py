"""Errors that a user can act on."""

import difflib
from collections.abc import Iterable

__all__ = ["DamagedError", "InputError", "MisfitError", "SnapshotError", "did_you_mean", "nearest"]


def nearest(word: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words that look most like `word`, best first; case, "-" and "_" make no difference."""

    def plain(text: str) -> str:
        return text.casefold().replace("-", "_")

    spelled: dict[str, str] = {}
    for name in known:
        spelled.setdefault(plain(name), name)
    return [spelled[m] for m in difflib.get_close_matches(plain(word), list(spelled), n=n, cutoff=cutoff)]


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """ " Did you mean X?" for the known word that looks most like `word`, or ""."""
    close = nearest(word, known, cutoff=cutoff)
    return f" Did you mean {close[0]}?" if close else ""


class InputError(ValueError):
    """Bad input: a config, file, folder, task or prompt. The command line prints it and exits with 2.

    The message says what was found, what is allowed and what to do next.
    """


class MisfitError(InputError):
    """A snapshot whose tree is not that of the state that it was to be restored onto.

    `config` is what the snapshot says that it was saved with, if anything.
    """

    config: object = None


class SnapshotError(RuntimeError):
    """A snapshot could not be written. Says which snapshots are still good. The command line exits with 1."""


class DamagedError(Exception):
    """A snapshot cannot be trusted: unreadable, or not what was saved. `SnapshotStore` then says so and takes another."""
