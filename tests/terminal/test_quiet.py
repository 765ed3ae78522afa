"""Nothing is written to stderr while JAX starts, unless the start fails."""

import os
import subprocess
import sys

import pytest

from xform.terminal.quiet import hide_stderr, is_command


def say() -> None:
    """Write like C++, not through `sys.stderr`."""
    os.write(2, b"E0000 could not find CUDA drivers\n")


def test_hide_stderr_drops_writes_inside_its_block_only(capfd: pytest.CaptureFixture[str]) -> None:
    with hide_stderr():
        say()
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def fails() -> None:
    with hide_stderr():
        say()
        raise RuntimeError("no backend")


def test_but_not_where_there_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="no backend"):
        fails()
    assert "could not find CUDA drivers" in capfd.readouterr().err


@pytest.mark.parametrize(("argv", "orig", "answer"), [
    (["-m"], ["python", "-m", "xform", "doctor"], True),
    (["-m"], ["python", "-m", "xform.other"], False),
    (["-m"], ["python", "-m", "pytest", "xform"], False),
    (["/usr/bin/xform", "doctor"], ["python", "/usr/bin/xform", "doctor"], True),
    (["train.py"], ["python", "train.py"], False),
    ([], ["python"], False),
])  # fmt: skip
def test_a_command_is_known(monkeypatch: pytest.MonkeyPatch, argv, orig, answer) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig)
    assert is_command() is answer


def test_a_command_starts_quietly_beside_a_plugin_that_does_not(tmp_path) -> None:
    """The plugin of JAX cannot start, like the one for CUDA on a machine without a GPU."""
    plugin = tmp_path / "jax_plugins" / "loud"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        "import os\n\n\ndef initialize():\n"
        "    os.write(2, b'E0000 no driver\\n')\n"
        "    raise RuntimeError('Unable to load CUDA. Is it installed?')\n"
    )
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    env = {**os.environ, "PYTHONPATH": path}
    start = [sys.executable, "-c", "import jax; jax.devices()"]
    loud = subprocess.run(start, env=env, capture_output=True, text=True, check=True)
    assert "no driver" in loud.stderr
    made = subprocess.run([sys.executable, "-m", "xform", "doctor"], env=env, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert made.stderr == ""
    assert "python" in made.stdout
