"""The public surface: a short list, each with a docstring and an example."""

import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import xform
from tests import versions

PUBLIC = {
    "Plan", "checkpoint", "clip_by_previous_global_norm", "compare", "fits", "fused_update",
    "fwd_and_bwd", "grad", "health", "hessian", "hvp", "install", "is_installed", "jacfwd",
    "jacobian", "jacrev", "jit", "jvp", "linear_transpose", "linearize", "load",
    "memory_analysis", "pareto", "plan", "plan_names", "remat", "residuals", "sliced", "uninstall",
    "value_and_grad", "vjp",
}  # fmt: skip
# The public modules; the names are the functions of those whose functions are like `xform`'s own.
MODULES = {
    "adjoints": {"graph", "name", "partials"},
    "curvature": {"fisher_vp", "ggnvp", "hessian_spectrum", "hutchinson", "natural_gradient_step",
                  "newton_step"},
    "memory": {"compare_with_device", "growth", "max_batch", "save_peaks", "why_oom"},
    "policies": {"checkpoints_per_while_loop"},
    "sparse": {"hessian", "jacobian", "laplacian", "sparsity"},
    **{name: set[str]() for name in ("equinox", "errors", "extend", "flax", "passes", "rules",
                                     "testing")},
}  # fmt: skip
EXTEND = {
    "RULES", "Body", "Flow", "Node", "Structured", "Traits", "add_rule", "bilinear", "composite",
    "constant", "linear", "pointwise",
}  # fmt: skip
FUNCTIONS = [
    *sorted(n for n in PUBLIC if inspect.isfunction(getattr(xform, n))), "jacobian",
    *(f"{module}.{name}" for module, names in MODULES.items() for name in sorted(names)),
]  # fmt: skip
SAME_AS_JAX = ["grad", "value_and_grad", "jvp", "vjp", "linearize", "jacfwd", "jacrev", "jacobian",
               "hessian", "fwd_and_bwd", "checkpoint", "remat", "linear_transpose"]  # fmt: skip


def public(name: str) -> Any:
    return operator.attrgetter(name)(xform)


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(xform.__all__) == PUBLIC
    assert set(xform.extend.__all__) == EXTEND
    assert len(xform.__all__) == len(PUBLIC)
    assert set(dir(xform)) == PUBLIC | set(MODULES)
    for name in dir(xform):
        assert inspect.ismodule(getattr(xform, name)) == (name in MODULES)
    for module in ("adjoints", "curvature", "memory", "sparse"):
        listed = {n for n in public(module).__all__ if inspect.isfunction(public(f"{module}.{n}"))}
        assert listed == MODULES[module]
    assert xform.remat is xform.checkpoint


def test_all_other_names_of_the_module_are_private_or_packages() -> None:
    others = {n for n in vars(xform) if not n.startswith("_")} - set(dir(xform))
    assert all(inspect.ismodule(getattr(xform, n)) for n in others)
    assert not others & {"importlib", "typing", "quiet", "packages"}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"equinox", "flax", "testing"}))
def test_modules_are_loaded_on_demand(module: str) -> None:
    code = f"import xform; assert xform.{module}.__doc__; {module} = xform.{module}; "
    code += "; ".join(f"assert callable({module}.{n})" for n in sorted(MODULES[module]))
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_documented_with_an_example(name: str) -> None:
    doc = inspect.getdoc(public(name)) or ""
    assert ">>> " in doc
    assert doc.splitlines()[0].endswith(".")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name: str) -> None:
    f = public(name)
    doc = inspect.getdoc(f) or ""
    others = re.findall(r"same as for `(\w+)`", " ".join(doc.split()))
    if set(others) & set(FUNCTIONS):
        return
    for parameter in inspect.signature(f).parameters:
        assert f"{parameter}:" in doc, f"{name} does not document {parameter}"


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"install", "is_installed", "uninstall"}))
def test_every_public_function_documents_its_returns_and_raises(name: str) -> None:
    doc = inspect.getdoc(public(name)) or ""
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
    "module",
    [xform, *(public(name) for name in sorted(MODULES) if name not in ("equinox", "flax"))],
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
        " 'equinox', 'pytest', 'scipy.optimize', 'scipy.sparse', 'xform.memory',"
        " 'xform.adjoints', 'xform.curvature', 'xform.sparse'} &"
        " set(sys.modules);"
        " assert not bad, bad; assert set(xform.__all__) <= set(dir(xform))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        xform.nothing_of_this_name  # noqa: B018


PROGRAMS = {"memory_analysis", "fits", "memory.max_batch", "memory.why_oom"}
DERIVATIVES = {"residuals", "plan", "compare", "pareto", "sparse.sparsity", "adjoints.graph"}


@pytest.mark.parametrize("name", sorted(PROGRAMS | DERIVATIVES))
def test_questions_take_their_subject_alike(name: str) -> None:
    ask = operator.attrgetter(name)(xform)
    first, args, *options = inspect.signature(ask).parameters.values()
    assert (first.name, args.name, args.kind) == ("f", "args", inspect.Parameter.VAR_POSITIONAL)
    keywords = [p.name for p in options if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert len(keywords) == (name in PROGRAMS or name in ("compare", "adjoints.graph"))
    assert ("argnums" in {p.name for p in options}) == (name in DERIVATIVES)
    text = (Path(__file__).parent.parent / "docs/transforms.md").read_text()
    page = text.partition("## What a question is about")[2]
    assert f"`{name.partition('.')[0] if name in DERIVATIVES else name}`" in page
