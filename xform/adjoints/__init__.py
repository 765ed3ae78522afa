"""Derivatives at values inside a program: of named ones, and of all of them as a graph."""
