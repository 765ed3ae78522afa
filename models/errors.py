"""The exception for every mistake in a user's input."""


class InputError(Exception):
    """An argument, setting or file cannot be used. The message is one line and names a remedy.

    The command line prints the message without a traceback and exits with code 2.
    """
