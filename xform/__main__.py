"""`python -m xform rules`: what xform knows, on the command line."""

from xform.commands import run

if __name__ == "__main__":
    print(run())
