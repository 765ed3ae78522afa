"""The table is complete: every rule has a case, every primitive of JAX has a rule or a reason."""

import ast
import functools
import gc
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax, multihost_utils, pallas, sparse
from jax.interpreters import batching

import xform
from tests.rules.elsewhere import ELSEWHERE
from tests.rules.tested import FAMILIES
from tests.versions import ABSENT, NEW
from xform._jax import Primitive, mlir, registered_names
from xform.errors import MissingRule, UnsupportedParam, WrongRule
from xform.interpret.cost import equation_flops
from xform.planner.costs.recompute import fusible
from xform.registry import table
from xform.registry.table import rules_by_name
from xform.registry.traits import REDUCTION, UNKNOWN
from xform.rules.unsupported import ONE_WAY, UNSUPPORTED
from xform.testing import check_rule

MODULES = [importlib.import_module(f"tests.rules.cases.{family}") for family in FAMILIES]
TRIED = {case.primitive for module in MODULES for case in module.CASES}
ROOT = Path(xform.__file__).parent.parent

# Kernels and calls that this machine cannot make; other primitives test the same rules.
UNMADE = {
    *(name for name, rule in rules_by_name().items() if rule.word == "opaque"),
    "stage", "broadcast_to", "with_memory_space_constraint",
}  # fmt: skip


# These modules register primitives of their own.
IMPORTED = (hijax, multihost_utils, pallas, sparse)

# Read before any test runs, because other tests declare rules. Some do so when they are imported.
LIBRARY = tuple(name for name in rules_by_name() if "the_test" not in name)
REGISTERED = registered_names()


def has_a_case(name: str) -> bool:
    known = name in NEW - REGISTERED or name in TRIED or name in ELSEWHERE or name in UNMADE
    return known or rules_by_name()[name].word == "constant"


def test_every_rule_has_a_case() -> None:
    assert not [name for name in LIBRARY if not has_a_case(name)]


def test_every_case_has_a_rule() -> None:
    assert not TRIED - rules_by_name().keys()


@pytest.mark.parametrize("path", sorted(set(ELSEWHERE.values())))
def test_files_of_tests_outside_the_case_table_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_primitive_has_a_rule_or_a_reason() -> None:
    """The public primitives, and those with a JAX derivative."""
    assert not registered_names() - rules_by_name().keys() - UNSUPPORTED.keys()


def test_unsupported_primitives_have_no_rule() -> None:
    assert not UNSUPPORTED.keys() & rules_by_name().keys()


def test_unsupported_primitives_exist_in_jax() -> None:
    existing = {p.name for p in gc.get_objects() if isinstance(p, Primitive)}
    assert UNSUPPORTED.keys() - existing == ABSENT


def test_reasons_are_short() -> None:
    assert len(set(UNSUPPORTED.values())) <= 12
    assert ONE_WAY.keys() <= rules_by_name().keys()


# A rule belongs to a Primitive object.

SIN = Primitive("sin")
SIN.def_impl(lambda x: 2 * x)
SIN.def_abstract_eval(lambda x: x)


def test_a_primitive_with_the_name_of_another_has_not_its_rule() -> None:
    with pytest.raises(MissingRule):
        xform.grad(SIN.bind)(3.0)
    assert table.traits(SIN) == UNKNOWN


def test_rule_of_a_same_named_primitive_leaves_the_original_rule() -> None:
    twin = Primitive("sin")
    twin.def_impl(lambda x: 2 * x)
    twin.def_abstract_eval(lambda x: x)
    xform.extend.pointwise(twin, lambda y, x: jnp.full_like(x, 2))
    assert xform.grad(lambda x: twin.bind(x) + jnp.sin(x))(0.0) == 3.0


def declared(slope: float) -> Primitive:
    prim = ONCE
    xform.extend.pointwise(prim, lambda y, x: jnp.full_like(x, slope))
    return prim


ONCE = Primitive("declared_twice")
ONCE.def_impl(lambda x: x)
ONCE.def_abstract_eval(lambda x: x)
mlir.register_lowering(ONCE, mlir.lower_fun(lambda x: x, multiple_results=False))


def test_a_rule_that_is_declared_again_replaces_the_first() -> None:
    inner = jax.jit(lambda x: declared_twice(x) * 2)
    declared_twice = declared(1.0).bind
    f = lambda x: inner(x) + declared_twice(x)
    assert xform.grad(f)(1.0) == 3.0
    assert jax.jit(lambda x: xform.grad(f)(x))(1.0) == 3.0
    declared(10.0)
    assert xform.grad(f)(1.0) == 30.0
    assert jax.jit(lambda x: xform.grad(f)(x))(1.0) == 30.0


@pytest.mark.parametrize("primitive", [lax.sin_p, "sin"])
def test_the_library_s_own_rules_stay(primitive: Primitive | str) -> None:
    with pytest.raises(WrongRule, match="xform has a rule"):
        xform.extend.pointwise(primitive, lambda y, x: 1)


def test_a_rule_that_a_user_declares_by_name_is_the_user_s(monkeypatch) -> None:
    monkeypatch.setattr(table, "RULES", dict(table.RULES))
    xform.extend.linear("schur", lambda ct, x: ct)
    again = xform.extend.linear("schur", lambda ct, x: ct)
    assert not again.own
    assert rules_by_name()["schur"] is again


def with_parameter(declare) -> Primitive:
    prim = Primitive("with_parameter")
    prim.def_impl(lambda x, **_: x)
    prim.def_abstract_eval(lambda x, **_: x)
    declare(prim)
    return prim


class Same(xform.extend.Structured):
    """The identity."""

    def jvp(self, eqn, xs, dxs):
        return xs, dxs


@pytest.mark.parametrize(
    "declare",
    [
        lambda p: xform.extend.constant(p, supported_params=("axis",)),
        lambda p: xform.extend.add_rule(
            p, Same("same", "structured", supported_params=frozenset(("axis",)))
        ),
        lambda p: xform.extend.pointwise(p, lambda y, x, *, axis: 1),
    ],
    ids=("constant", "structured", "pointwise"),
)
def test_a_parameter_that_a_rule_does_not_know_is_refused(declare) -> None:
    prim = with_parameter(declare)
    xform.jvp(lambda x: prim.bind(x, axis=1, new=None), (1.0,), (1.0,))
    with pytest.raises(UnsupportedParam, match="new=2"):
        xform.jvp(lambda x: prim.bind(x, axis=1, new=2), (1.0,), (1.0,))


def test_rules_of_primitives_that_are_loaded_later_are_found() -> None:
    assert "pallas_call" in table.rules_by_name()
    assert not {p.name for p in table.RULES} & table.PENDING_RULES.keys()


def test_a_rule_for_one_s_own_primitive_is_checked_in_short_floats_too() -> None:
    cube, prim = lambda x: x * x * x, Primitive("a_cube_of_one_s_own")
    prim.def_impl(cube)
    prim.def_abstract_eval(lambda x: x)
    mlir.register_lowering(prim, mlir.lower_fun(cube, multiple_results=False))
    batching.defvectorized(prim)
    check = functools.partial(
        check_rule, prim.bind, np.array([0.5, -2.0]), primitive=prim.name, jax=False
    )
    xform.extend.pointwise(prim, lambda y, x: 3 * x * x)
    check()  # float32 differences show nothing, so they are not used
    xform.extend.pointwise(prim, lambda y, x: 3 * lax.stop_gradient(x) * x)
    with pytest.raises(WrongRule, match="jvp of vjp"):
        check(dtypes=["float64"], checks=["second"])


# Traits.


def test_a_call_names_its_body() -> None:
    calls = {name: rule.traits.call for name, rule in rules_by_name().items() if rule.traits.call}
    assert calls.items() >= {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}.items()
    supported = {name: rules_by_name()[name].supported_params for name in calls}
    assert all(supported[name] is None or call in supported[name] for name, call in calls.items())


def test_a_trait_of_a_user_s_rule_is_used() -> None:
    prim = with_parameter(lambda p: xform.extend.linear(p, lambda ct, x: ct, traits=REDUCTION))
    eqn = jax.make_jaxpr(prim.bind)(jnp.ones(3)).eqns[0]
    assert fusible(eqn)
    assert equation_flops(eqn) == 3


# No other code depends on specific primitives.

APART = ("rules", "memory")  # the registry, and files that read HLO operations by name
PACKAGE = Path(xform.__file__).parent


def collections_of_names(path: Path) -> Iterator[tuple[int, set[str]]]:
    for node in ast.walk(ast.parse(path.read_text())):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        found = {i.value for i in items if isinstance(i, ast.Constant)} & set(LIBRARY)
        if len(found) > 2:
            yield node.lineno, found


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] not in APART]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sets_of_primitives_stand_in_the_registry_only(path: Path) -> None:
    assert not list(collections_of_names(path)), (
        "make it a trait of the rules: see xform/registry/traits.py"
    )
    compared = re.findall(r"primitive\.name (?:==|!=|in|not in) .*\"", path.read_text())
    assert not compared, "compare Primitive objects: somebody else's may have the same name"


def test_such_a_set_is_found(tmp_path: Path) -> None:
    file = tmp_path / "planner.py"
    file.write_text('VIEWS = frozenset(("reshape", "squeeze", "transpose"))')
    assert list(collections_of_names(file)) == [(1, {"reshape", "squeeze", "transpose"})]


def test_a_name_that_is_no_primitives_is_refused() -> None:
    with pytest.raises(WrongRule, match="JAX has no primitive of that name"):
        xform.extend.pointwise("sine", lambda y, x: jnp.cos(x))
    assert "sine" not in table.PENDING_RULES
