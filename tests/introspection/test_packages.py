"""The distribution is `jax-xform`: no text tells a user to install the other project `xform`."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import xform
from xform.introspection import packages

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [
    path
    for folder in ("xform", "models", "tests", "experiments", "docs", ".ci", ".")
    for path in (ROOT / folder).glob("*" if folder in (".", ".ci") else "**/*")
    if path.suffix in (".py", ".md", ".toml", ".js", ".html", ".txt", "")
    and path.is_file() and path != Path(__file__)
]  # fmt: skip


def test_the_distribution_and_its_version() -> None:
    assert PROJECT["name"] == packages.DISTRIBUTION == "jax-xform"
    assert xform.__version__ in (PROJECT["version"], "0+unknown")
    assert packages.version(packages.DISTRIBUTION) in (PROJECT["version"], None)
    assert packages.version("jax")
    assert packages.version("no-such-package") is None


def test_version_of_an_uninstalled_source_tree_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda package: None)
    assert packages.own_version() == "0+unknown"
    monkeypatch.setattr(packages, "version", lambda package: f"9 of {package}")
    assert packages.own_version() == "9 of jax-xform"


def test_pip_arguments_name_declared_extras_of_jax_xform() -> None:
    for name in ("tpu", "gpu-aot", "plot", "train"):
        assert name in PROJECT["optional-dependencies"]
        assert packages.pip_argument(name) == f"'jax-xform[{name}]'"


def test_no_text_names_the_other_project() -> None:
    # The other project's name, but not as part of ours, after `pip install` or with an extra.
    other = re.compile(r"pip3? install [^\n`]*?(?<![\w./-])xform\b|(?<![\w./-])xform\[[a-z,-]+\]")
    assert other.search("pip install -U 'xform[tpu]'")
    assert other.search("pip install xform")
    assert not other.search("pip install 'jax-xform[tpu]'")
    found = {str(p): m[0] for p in TEXTS if (m := other.search(p.read_text(errors="replace")))}
    assert not found
    readme = (ROOT / "README.md").read_text()
    assert "pip install jax-xform" in readme
    assert "pip install 'jax-xform[tpu,gpu-aot]'" in readme


def test_the_command_is_python_m_xform(tmp_path: Path) -> None:
    assert PROJECT["scripts"] == {"xform": "xform.__main__:script"}
    if packages.version(packages.DISTRIBUTION):
        scripts = importlib.metadata.entry_points(group="console_scripts", name="xform")
        assert {s.value for s in scripts} == {"xform.__main__:script"}
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "def loss(x):\n    return jnp.sin(jnp.exp(x)).sum()\n"
        "def inputs():\n    return (jnp.ones(3),)\n"
    )
    # Like pip's script: its folder is first on the path, and the user's module is not in it.
    script = "import sys; sys.path[0] = sys.argv.pop(1); from xform.__main__ import script; "
    said = [
        subprocess.run(
            [sys.executable, *how, "residuals", "mine:loss"], capture_output=True, text=True,
            check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout
        for how in (["-m", "xform"], ["-c", f"{script}sys.exit(script())", str(ROOT / "xform")])
    ]  # fmt: skip
    assert said[0] == said[1]
    assert "backward pass of loss" in said[0]
