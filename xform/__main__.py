"""The command line: `python -m xform`."""

import os
import sys

from xform.commands import main


def script() -> int:
    """Run the command `xform`. Like `python -m xform`, it imports from the current folder."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # Python sets it to the folder where the script is installed
    return main()


if __name__ == "__main__":
    sys.exit(main())
