"""The command line `python -m xform`, which is also installed as the command `xform`."""

import os
import sys

from xform.commands import main


def script() -> int:
    """Run the command `xform` and return its exit status.

    Like `python -m xform`, it imports modules from the current folder.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # Python sets it to the folder where the script is installed
    return main()


if __name__ == "__main__":
    sys.exit(main())
