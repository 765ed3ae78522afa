"""Plans of steps on disk, so that a program that starts again compiles its step once.

The name of a file is a digest of everything that the plan depends on: the traced step with its
shardings, the budget, the versions of xform, JAX and its compilers, XLA's flags, and the devices.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from xform.errors import WrongArgument, XformError
from xform.introspection.packages import own_version
from xform.memory.answers import depends_on
from xform.memory.targets import Target
from xform.policies.budgets import Budget
from xform.program.fingerprint import fingerprint, text_of
from xform.program.ir import program
from xform.program.naming import digest
from xform.steps.processes import agreed_bytes
from xform.steps.step_plan import StepPlan
from xform.storage import results


def plan_file(
    folder: str | os.PathLike[str] | None,
    traced: Any,
    shardings: Any,
    budget: Budget,
    target: Target,
) -> Path | None:
    """The file for the plan of a traced step; None without a folder."""
    if folder is None:
        return None
    whole = program(traced.jaxpr)
    donated = tuple(a.donated for a in jax.tree.leaves(traced.args_info))
    device = (target.name, target.device.name, target.device.capacity_bytes, jax.process_count())
    key = [
        fingerprint(whole),
        text_of((donated, shardings, budget, device)),
        *depends_on(),
        own_version(),
    ]
    return Path(folder) / f"{digest(key)}.step.json"


def load_plan(file: Path | None) -> StepPlan | None:
    """The plan in a file; None if there is no file, or it cannot be read.

    Of several processes the first one reads the file, as the others may have other disks.
    """
    if file is None:
        return None
    text = b""
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            text = file.read_bytes()
    with contextlib.suppress(WrongArgument):
        return results.parse("StepPlan", agreed_bytes(text).decode(errors="replace"), file)
    return None


def save_plan(file: Path | None, plan: StepPlan) -> None:
    """Write a plan, by the first process. If that fails, it is made again next time."""
    if file is not None and jax.process_index() == 0:
        with contextlib.suppress(XformError, OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            plan.save(file)
