"""Errors that the user can fix: the CLI prints them as one line, without a traceback.

Any other exception is a bug and keeps its traceback.
"""


class HoldfastError(Exception):
    """Something outside the program is wrong. The message says what is wrong, where, and what to do. Exit code 1."""


class UsageError(HoldfastError):
    """The command line or the configuration is wrong. Exit code 2."""


REFUSED = "holdfast refused: "
"""Marks a HoldfastError that a rank sends to its supervisor: a mistake of the user, which a restart would repeat."""
