"""The commands of `python -m models`."""
