"""The line of a model: in a script, in an installed package, and never a framework's own."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from xform.program.frameworks import is_framework, is_library, line_of_model
from xform.program.source import frame

DENSE, MODULE = "flax/linen/linear.py", "flax/linen/module.py"
KERAS = "keras/src/layers/core/dense.py", "keras/src/layers/layer.py", "keras/src/models/model.py"
FIT = "keras/src/backend/jax/trainer.py"


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        ([DENSE, MODULE, "/me/model.py", "/me/train.py"], "/me/model.py"),
        ([DENSE, MODULE, "maxtext/llama2.py", "/me/train.py"], "maxtext/llama2.py"),
        ([MODULE, DENSE], DENSE),
        ([MODULE], MODULE),
        (["optax/losses/_classification.py", "/me/train.py"], "/me/train.py"),
        (["numpy/linalg/_linalg.py", "tunix/models/llama.py"], "tunix/models/llama.py"),
        ([*KERAS, FIT, "/me/train.py"], KERAS[0]),
        ([*KERAS[:2], "/me/layer.py", KERAS[2], FIT, "/me/train.py"], "/me/layer.py"),
        ([KERAS[2], FIT, "/me/train.py"], KERAS[2]),
        (["equinox/nn/_linear.py", "equinox/_module.py", "/me/a.py"], "/me/a.py"),
        (["haiku/_src/basic.py", "haiku/_src/module.py"], "haiku/_src/basic.py"),
        ([], ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_the_line(frames: list[str], found: str, folder: str) -> None:
    full = lambda path: path if path.startswith("/") else f"/lib/{folder}/{path}"
    assert line_of_model((full(path), path) for path in frames) == found


@pytest.mark.parametrize("module", [jax, xform, importlib, importlib.metadata])
def test_libraries(module) -> None:
    assert is_library(module.__file__)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_package_beside_the_standard_library_is_no_part_of_it(folder: str) -> None:
    standard = Path(importlib.__file__).parent.parent
    assert is_library(str(standard / "json" / "decoder.py"))
    assert not is_library(str(standard / folder / "maxtext" / "train.py"))
    assert not is_library("/me/train.py")


def test_a_framework_imported_from_a_checkout_is_recognized(tmp_path, monkeypatch) -> None:
    module = type(sys)("haiku")
    module.__file__ = str(tmp_path / "checkouts" / "haiku" / "__init__.py")
    monkeypatch.setitem(sys.modules, "haiku", module)
    assert is_framework(f"{tmp_path}/checkouts/haiku/_src/basic.py")
    assert not is_framework(f"{tmp_path}/checkouts/haiku_model/basic.py")
    assert not is_framework("/me/flax/examples/gemma/train.py")


MODEL = """
import flax.linen as nn
import jax.numpy as jnp

def block(w, x):
    h = jnp.tanh(x @ w)
    return jnp.sin(h @ w)

class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(64)(x))
        return nn.Dense(64)(x)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of an installed package."""
    package = tmp_path / "lib" / "site-packages" / "installed_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(MODEL)
    monkeypatch.syspath_prepend(package.parent)
    yield importlib.import_module("installed_model.layers")
    sys.modules.pop("installed_model.layers")


W, X = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)


def test_reports_name_the_lines_of_an_installed_model(model) -> None:
    loss = lambda w, x: jnp.sum(model.block(w, model.block(w, x)))
    rows = xform.memory_analysis(xform.grad(loss, policy="save_everything"), W, X)
    found = {r.where for r in rows if r.category == "activation"}
    assert found
    assert all(where.startswith("installed_model/layers.py:") for where in found)
    saved = {r.where for r in xform.residuals(loss, W, X)}
    assert any("installed_model/layers.py:6" in where for where in saved)


def test_the_line_calls_the_layer_of_a_framework(model) -> None:
    network = model.Network()
    params = jax.eval_shape(network.init, jax.random.key(0), X)
    loss = lambda p, x: jnp.sum(network.apply(p, x) ** 2)
    rows = xform.memory_analysis(xform.grad(loss, policy="save_everything"), params, X)
    found = {r.where for r in rows if r.category in ("activation", "gradient")}
    assert any(where.startswith("installed_model/layers.py:1") for where in found)
    assert not any("flax/" in where for where in found)


def test_the_lines_of_a_folder_beside_xform_are_shown() -> None:
    file = Path(xform.__file__).parent.parent / "xform_app" / "model.py"
    names: dict[str, Any] = {"jnp": jnp}
    exec(compile("def f(x):\n    return jnp.sin(x)", str(file), "exec"), names)
    (eqn,) = jax.make_jaxpr(names["f"])(1.0).eqns
    assert frame(eqn).startswith(f"{file}:2")
