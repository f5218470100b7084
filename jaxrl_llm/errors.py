"""Errors that a user can act on."""

__all__ = ["InputError", "SnapshotError"]


class InputError(ValueError):
    """Bad input: a config, file, folder, task or prompt. The command line prints it and exits with 2.

    The message says what was found, what is allowed and what to do next.
    """


class SnapshotError(RuntimeError):
    """A snapshot could not be written. Says which snapshots are still good. The command line exits with 1."""
