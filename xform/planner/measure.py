"""`Measure`: the compiled bytes of a program under different plans. Each is compiled once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from xform.planner.problem import Problem
from xform.program.fingerprint import fingerprint
from xform.storage.bounded_cache import BoundedCache
from xform.terminal import progress_line

# Limits on the plans that are compiled for a budget, besides the default: MAX_FIRST_COMPILES until
# one of them fits, and MAX_COMPILES in total. Before a budget is refused, MAX_BEFORE_REFUSAL plans
# are compiled at most, the default among them.
MAX_FIRST_COMPILES, MAX_COMPILES, MAX_BEFORE_REFUSAL = 3, 6, 8

# Compiled bytes by the plans of a program.
Known = dict[Hashable, float]
# The same by program, for as long as the process lives.
_known: BoundedCache[Hashable, Known] = BoundedCache(64)


class Measure:
    """Compiles a program under plans and returns its bytes.

    Args:
      compile_: compiles the program under a choice of the search, such as some plans, and returns
        its bytes; infinite if the compiler refuses it without telling a size.
      known: bytes that are known already; new ones are added. None: no bytes are known.

    Attributes:
      compiles: how many programs this object compiled. Programs whose bytes were known do not
        count.
      seconds: the time that these compilations took.
    """

    def __init__(self, compile_: Callable[[Any], float], known: Known | None = None) -> None:
        self._compile, self._known = compile_, {} if known is None else known
        self.compiles, self.seconds = 0, 0.0

    def bytes(self, choice: Any) -> float:
        """Return the compiled bytes under some plans; infinite if the program is refused."""
        key = choice.key
        if key not in self._known:
            done = f"{self.compiles} of at most {MAX_BEFORE_REFUSAL}"
            progress_line.update(f"{done} candidates compiled")
            start = time.perf_counter()
            size = self._compile(choice)
            self.seconds += time.perf_counter() - start
            self._known[key] = size
            self.compiles += 1
        return self._known[key]


def known_bytes(problem: Problem, *dependencies: Hashable) -> Known:
    """Return the compiled bytes that this process knows of the plans of a derivative.

    `dependencies` are everything else that the bytes depend on, such as the target and donated
    arguments.
    """
    joint = problem.joint()
    return _known.setdefault((fingerprint(joint.program), joint.active, joint.seeded,
                              *dependencies), {})  # fmt: skip
