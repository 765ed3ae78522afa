"""Find the object that a command line names as `module:name` or `path.py:name` (a reference)."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import operator
import os
import sys
from pathlib import Path
from typing import Any

from xform.errors import WrongArgument
from xform.introspection.loaded import names_of

FORM = "module:name or path.py:name"


def reference(text: str) -> str:
    """Check the form of a reference and return it. For `type=` of an argparse option."""
    module, _, name = text.rpartition(":")
    parts = [] if module.endswith(".py") else module.split(".")
    if not all(part.isidentifier() for part in (*parts, *name.split("."))):
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form {FORM}")
    return text


def resolve(text: str) -> Any:
    """Return the object that a reference names.

    Raises:
      WrongArgument: there is no such module, file or object.
    """
    owner, name = module_of(text), text.rpartition(":")[2]
    with contextlib.suppress(AttributeError):
        return operator.attrgetter(name)(owner)
    names = sorted(n for n, x in vars(owner).items() if not n.startswith("_") and callable(x))
    raise WrongArgument(
        text,
        f"the module has no {name!r}",
        "",
        f"name a function of it: {', '.join(names) or 'it has none'}",
    )


def module_of(text: str) -> Any:
    """Import and return the module that a reference names."""
    module = text.rpartition(":")[0]
    if module.endswith(".py"):
        return _from_file(text, os.path.realpath(module))
    remedy = (
        "run in the folder that has it, put that folder on PYTHONPATH, or name the file: "
        f"path/to/{module.replace('.', '/')}.py:{text.rpartition(':')[2]}"
    )
    return import_named(module, text, remedy)


def import_named(module: str, request: str, remedy: str) -> Any:
    """Import and return a module that the user named. An error inside the module passes through.

    Raises:
      WrongArgument: there is no such module. `request` and `remedy` are parts of the message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        problem = f"there is no module {error.name!r}"
        raise WrongArgument(request, problem, "", remedy) from None


def _from_file(text: str, path: str) -> Any:
    """Import the module in a file. As in a script, it can import other files of its folder."""
    if not Path(path).is_file():
        raise WrongArgument(
            text, f"there is no file {path!r}", "", "name a Python file, or a module: module:name"
        )
    folder, file = os.path.split(path)
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.insert(0, folder)
    # A loaded module of the same name may be another one, such as Python's own `code` or `test`.
    name = file.removesuffix(".py")
    for known in (sys.modules.get(name), sys.modules.get(path)):
        if os.path.realpath(names_of(known).get("__file__") or "") == path:
            return known
    spec = importlib.util.spec_from_file_location(path if name in sys.modules else name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
