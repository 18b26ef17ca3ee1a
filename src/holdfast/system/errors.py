"""Errors that are the user's to mend: shown as one line, without a traceback.

Anything else that escapes is a bug of ours and keeps its traceback.
"""


class HoldfastError(Exception):
    """Something outside the program is wrong. The message names the culprit and says what to do. Exit code 1."""


class UsageError(HoldfastError):
    """The command line or the configuration is wrong. Exit code 2."""


REFUSED = "holdfast refused: "
"""Marks a HoldfastError on its way from a rank to its supervisor: the user's mistake, which a restart would repeat."""
