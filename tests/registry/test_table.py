"""Parameters that a rule does not support are refused, unless they ask for nothing."""

from typing import Any

import jax
import pytest

from xform.errors import UnsupportedParam
from xform.registry.table import rules_by_name


@pytest.mark.parametrize(("value", "refused"), [
    (None, False), (False, False), ((), False), ((1,), True), (True, True), (0, True), ("", True),
])  # fmt: skip
def test_a_parameter_that_the_rule_does_not_know(value: Any, refused: bool) -> None:
    (eqn,) = jax.make_jaxpr(jax.lax.exp)(1.0).eqns
    eqn, rule = eqn.replace(params={**eqn.params, "new": value}), rules_by_name()["exp"]
    assert rule.supported_params is not None
    if refused:
        with pytest.raises(UnsupportedParam, match="does not support the parameter new="):
            rule.check(eqn)
    else:
        rule.check(eqn)
