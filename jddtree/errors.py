"""The error types that users meet.

A `UserError` is caused by what the user gave (a file, a flag, a message), not by a defect. Its text is one
line that names the thing, the value found and the value wanted, and what to do. The command line prints it
and exits with 1.
"""


class UserError(Exception):
    """Something the user gave cannot be used; the message is one line and says what to do."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


class UsageError(UserError):
    """Options that do not go together; the command line exits with 2."""
