"""The one exception that a user's input can cause."""


class InputError(Exception):
    """Something that was given cannot be used; the text is one line and says what to do.

    The command line prints it without a traceback and ends with code 2.
    """
