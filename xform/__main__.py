"""`python -m xform`: what xform knows, and sees, on the command line."""

import os
import sys

from xform.commands import main


def script() -> int:
    """The command `xform`: the same, and like `python -m` it finds modules where it is run."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # of a script it is the folder where scripts are installed
    return main()


if __name__ == "__main__":
    sys.exit(main())
