"""The public surface: a short list, each with a docstring and an example."""

import inspect
import re
import subprocess
import sys

import jax
import pytest

import xform
from tests import versions

PUBLIC = {
    "Plan", "checkpoint", "compare", "errors", "extend", "fisher_vp", "fits", "fwd_and_bwd",
    "ggnvp", "grad", "graph", "health", "hessian", "hessian_spectrum", "hutchinson", "hvp",
    "install", "installed", "jacfwd", "jacobian", "jacrev", "jvp", "laplacian", "linear_transpose",
    "linearize", "max_batch", "memory_analysis", "name", "natural_gradient_step", "newton_step",
    "pareto", "partials", "passes", "plan", "policies", "remat", "residuals", "rules",
    "sparse_hessian", "sparse_jacobian", "sparsity", "uninstall", "value_and_grad", "vjp",
    "while_checkpoints", "why_oom",
}  # fmt: skip
EXTEND = {
    "RULES", "Node", "Structured", "Traits", "add_rule", "bilinear", "composite", "constant",
    "linear", "pointwise",
}  # fmt: skip
FUNCTIONS = [*sorted(n for n in PUBLIC if inspect.isfunction(getattr(xform, n))), "jacobian"]
SAME_AS_JAX = ["grad", "value_and_grad", "jvp", "vjp", "linearize", "jacfwd", "jacrev", "jacobian",
               "hessian", "fwd_and_bwd", "checkpoint", "remat", "linear_transpose"]  # fmt: skip


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(xform.__all__) == PUBLIC
    assert set(xform.extend.__all__) == EXTEND
    assert len(xform.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert hasattr(xform, name)
    assert xform.remat is xform.checkpoint
    assert callable(xform.testing.check_rule)  # imported at its first use, like xform.flax


def test_no_other_public_name_leaks() -> None:
    modules = {n for n in dir(xform) if inspect.ismodule(getattr(xform, n))}
    names = {n for n in dir(xform) if not n.startswith("_")} - modules - {"TYPE_CHECKING", "Any"}
    assert names <= PUBLIC


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_documented_with_an_example(name: str) -> None:
    doc = inspect.getdoc(getattr(xform, name)) or ""
    assert ">>> " in doc
    assert doc.splitlines()[0].endswith(".")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name: str) -> None:
    f = getattr(xform, name)
    doc = inspect.getdoc(f) or ""
    others = re.findall(r"same as for `(\w+)`", " ".join(doc.split()))
    if set(others) & set(FUNCTIONS):
        return
    for parameter in inspect.signature(f).parameters:
        assert f"{parameter}:" in doc, f"{name} does not document {parameter}"


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"install", "installed", "uninstall"}))
def test_every_public_function_says_what_it_returns_and_raises(name: str) -> None:
    doc = inspect.getdoc(getattr(xform, name)) or ""
    assert "Raises:\n" in doc
    assert "Returns:\n" in doc or re.search(r"of the result|gradient has the tree", doc)
    assert re.search(r"shape|array|scalar|pytree|bytes|context", doc)


@pytest.mark.parametrize("name", SAME_AS_JAX)
def test_signatures_start_like_jaxs(name: str) -> None:
    theirs = getattr(jax, name, None) or getattr(versions, name)
    ours = inspect.signature(getattr(xform, name)).parameters
    skipped = {"reduce_axes", "concrete", "self"}
    wanted = [p for p in inspect.signature(theirs).parameters.values() if p.name not in skipped]
    first = [p.name for p in ours.values()]
    for p in wanted[1:]:
        if p.name in ("_", "args", "kwargs"):
            continue
        assert p.name in first or p.kind is p.VAR_POSITIONAL, f"{name} lacks {p.name}"
        if p.name in first:
            mine = ours[p.name]
            assert mine.default == p.default or mine.kind is mine.KEYWORD_ONLY


@pytest.mark.parametrize(
    "module", [xform, xform.errors, xform.policies, xform.extend, xform.testing]
)
def test_public_modules_and_classes_are_documented(module) -> None:
    assert module.__doc__
    for name, value in vars(module).items():
        mine = getattr(value, "__module__", "").startswith("xform")
        if not name.startswith("_") and callable(value) and mine:
            assert inspect.getdoc(value), f"{module.__name__}.{name}"


def test_import_needs_only_jax() -> None:
    code = (
        "import sys, xform; bad = {'flax', 'optax', 'chex', 'grain', 'orbax', 'rich', 'matplotlib',"
        " 'equinox', 'pytest', 'scipy.optimize', 'scipy.sparse', 'xform.memory'} &"
        " set(sys.modules);"
        " assert not bad, bad; assert set(xform.__all__) <= set(dir(xform))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        xform.nothing_of_this_name  # noqa: B018
