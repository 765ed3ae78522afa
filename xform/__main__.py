"""`python -m xform`: what xform knows, and sees, on the command line."""

import sys

from xform.commands import main

if __name__ == "__main__":
    sys.exit(main())
