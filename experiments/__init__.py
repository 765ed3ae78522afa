"""Measurements: one folder for each question."""
