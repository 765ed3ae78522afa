"""Atomic writing of files, and caches of bounded size."""
