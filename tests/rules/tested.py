"""How each primitive is tested: the number of its cases, or the file that tests it.

`python -m tests.rules.tested`, with the newest JAX, writes this into the package for the command
`rules`.
"""

import collections
import importlib
import json
from pathlib import Path

from tests.rules.elsewhere import ELSEWHERE
from xform.commands.rules import TESTED

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("cases/[a-z]*.py"))


def how_tested() -> dict[str, str]:
    modules = [importlib.import_module(f"tests.rules.cases.{family}") for family in FAMILIES]
    count = collections.Counter(case.primitive for module in modules for case in module.CASES)
    cases = {name: f"{n} case{'s' * (n > 1)}" for name, n in count.items()}
    return dict(sorted({**ELSEWHERE, **cases}.items()))


if __name__ == "__main__":
    TESTED.write_text(json.dumps(how_tested(), indent=0) + "\n")
