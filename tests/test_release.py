"""The release: built, installed in an empty environment, and used."""

import os
import re
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
# Only Python's and JAX's own packages, nothing of a checkout.
HERE = {
    k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX", "XLA", "VIRTUAL"))
}


def made(folder: Path) -> Path:
    """Create a new environment, and return the folder of its commands."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def said(*command: object, where: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], cwd=where, env=HERE, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def pip(bin: Path, *what: object) -> None:
    constraints = next(
        path for path in (ROOT / "constraints.txt", ROOT / "constraints-newest.txt")
        if f"\njax=={jax.__version__}\n" in path.read_text()
    )  # fmt: skip
    quiet = ("--quiet", "--disable-pip-version-check", "-c", constraints)
    said(bin / "python", "-m", "pip", "install", *quiet, *what, where=bin)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build wheel and source distribution."""
    out = tmp_path_factory.mktemp("built")
    bin = made(out / "builder")
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip(bin, needed)
    said(bin / "python", "-m", "hatchling", "build", "--directory", out, where=ROOT)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the commands of an environment with only the wheel and its requirements."""
    bin = made(tmp_path_factory.mktemp("installed") / "env")
    pip(bin, built[0])
    return bin


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_and_source_distribution_contain_all_files(built: tuple[Path, Path]) -> None:
    wheel, source = built
    assert wheel.name == f"jax_xform-{PROJECT['version']}-py3-none-any.whl"
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "xform").rglob("*") if p.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    trainer = {f"xform_trainer/{p.relative_to(ROOT)}" for p in (ROOT / "models").rglob("*")
               if p.is_file() and "__pycache__" not in p.parts}  # fmt: skip
    assert {name for name in packed if not re.match(r"jax_xform-[^/]*dist-info/", name)} == (
        files | trainer
    )
    with tarfile.open(source) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert files < names
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "docs/index.md"} < names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_example_runs_where_nothing_else_is(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0])
    done = said(installed / "python", "-W", "error", "first.py", where=tmp_path)
    assert done.stderr == ""
    assert "kept for the backward pass of loss" in done.stdout
    assert "first.py:5" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_doctor_lists_versions_and_install_commands_for_missing_extras(
    installed: Path, tmp_path: Path
) -> None:
    done = said(installed / "xform", "doctor", where=tmp_path)
    assert done.stderr == ""
    assert re.search(rf"^jax-xform +{re.escape(PROJECT['version'])}$", done.stdout, re.MULTILINE)
    assert re.search(rf"^jax +{re.escape(jax.__version__)}$", done.stdout, re.MULTILINE)
    assert re.search(r"^cpu +cpu +installed$", done.stdout, re.MULTILINE)
    told = set(re.findall(r"pip install (\S+)", done.stdout))
    assert told == {"'jax-xform[tpu]'", "'jax-xform[gpu-aot]'", "flatbuffers"}
    same = said(installed / "python", "-m", "xform", "doctor", where=tmp_path)
    assert same.stdout == done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_importing_flax_or_equinox_support_names_the_missing_extra(
    installed: Path, tmp_path: Path
) -> None:
    """Each module and picture that needs more says what to install."""
    for module, extra in (("flax", "train"), ("equinox", "equinox")):
        code = f"import xform\ntry: xform.{module}\nexcept ImportError as e: print(e)"
        told = said(installed / "python", "-c", code, where=tmp_path).stdout
        assert f"pip install 'jax-xform[{extra}]'" in told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_without_its_extra_names_the_extra_to_install(
    installed: Path, tmp_path: Path
) -> None:
    command = [installed / "xform", "train", "--steps", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=HERE, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'jax-xform[train]'" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_and_generate_run_with_the_train_extra_installed(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    bin = made(tmp_path / "env")
    pip(bin, f"{built[0]}[train]")
    said(bin / "xform", "train", "--preset", "tiny", "--steps", "2", "--out", "run", where=tmp_path)
    done = said(bin / "xform", "generate", "--run", "run", "--length", "10", where=tmp_path)
    assert done.stdout.strip()
    assert "xform_trainer/models/nets/" in (tmp_path / "run/plan.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_source_distribution_installs(
    built: tuple[Path, Path], installed: Path, tmp_path: Path
) -> None:
    pip(installed, "--force-reinstall", "--no-deps", built[1])
    code = "import xform; print(xform.__version__, xform.__file__)"
    version, file = said(installed / "python", "-c", code, where=tmp_path).stdout.split()
    assert version == PROJECT["version"]
    assert file.startswith(str(installed.parent))
