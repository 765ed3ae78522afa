"""Parse a command line: a flag for each setting of `models.settings`, and one-line errors."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from models.errors import InputError
from models.settings import leaves, literal, nearest


class Parser(argparse.ArgumentParser):
    """A parser with a flag for each setting, which raises `InputError`s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def add_settings(self, *trees: Any) -> None:
        """Add a flag for each setting of the trees, in one group per section.

        A flag that is not given is absent from the result of `parse`.
        """
        groups: dict[tuple[str, ...], Any] = {}
        settings = {leaf.name: leaf for tree in reversed(trees) for leaf in leaves(tree)}
        for leaf in settings.values():
            if leaf.sections not in groups:
                title = f"settings in [{'.'.join(leaf.sections)}]" if leaf.sections else "settings"
                groups[leaf.sections] = self.add_argument_group(title)
            shown = "" if leaf.value in (None, ()) else f" ({literal(leaf.value)})"
            options: dict[str, Any] = {"help": (leaf.about.help + shown).replace("%", "%%")}
            if leaf.kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif leaf.kind is tuple:
                options |= {"action": "append", "metavar": "N,N" if leaf.item is int else "TEXT"}
            else:
                # A path stays a string, so that "" can be refused: `Path("")` is `Path(".")`.
                options["type"] = leaf.kind if leaf.kind in (int, float) else str
                options["metavar"] = "PATH" if options["type"] is not leaf.kind else "N"
                if leaf.kind is str:
                    options["metavar"] = "|".join(leaf.about.choices) or "TEXT"
            groups[leaf.sections].add_argument(
                leaf.flag, dest=leaf.name, default=argparse.SUPPRESS, **options
            )

    def parse(self, arguments: list[str]) -> dict[str, Any]:
        """Return the values of the given flags by name.

        Raises:
          InputError: a flag is unknown, or a value cannot be parsed. For an unknown flag the
            message has the nearest flag.
        """
        values, unknown = self.parse_known_args(arguments)
        if unknown:
            # Leading dashes must not count as similarity.
            names = [name.removeprefix("--") for name in self._option_string_actions]
            near = nearest(unknown[0].partition("=")[0].removeprefix("--"), names, 0.6)
            near = near.replace("mean ", "mean --")
            raise InputError(f"unknown argument {unknown[0]!r}{near}")
        return vars(values)

    def error(self, message: str) -> NoReturn:
        """Raise an `InputError`, where argparse would end the program."""
        raise InputError(message)
