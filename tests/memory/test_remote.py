"""The compiling process: whatever happens to it, nothing is left, and the error reports it."""

import json
import os
import subprocess
import sys
import tempfile
import time

import pytest

from xform import errors
from xform.memory import remote
from xform.memory.lowering import LoweredProgram
from xform.memory.targets import parse_target

LOWERED = LoweredProgram("step", b"program", 1, [], [0], ("x",))
ANSWER = {"bytes": {"temp": 3}, "compile_seconds": 1.5}
# A worker that answers with the request as the module.
ANSWERS = f"""
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "dump").mkdir()
(folder / "module").write_bytes((folder / "request.json").read_bytes())
(folder / "answer.json").write_text({json.dumps(ANSWER)!r})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Set the folder for temporary files, and check that it is empty after the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch):
    return lambda code: monkeypatch.setattr(remote, "WORKER", (sys.executable, "-c", code))


def failed(timeout: float = 30) -> str:
    with pytest.raises(errors.CompilationFailed) as caught:
        remote.compile_there(LOWERED, parse_target("tpu:v5e:1x1"), timeout)
    return str(caught.value)


REMEDY = "\n  remedy:  try a smaller program; if that fails too, report the compiler's log"


def test_an_answer(folder, worker) -> None:
    worker(ANSWERS)
    answer = remote.compile_there(LOWERED, parse_target("tpu:v5e:1x1"), 30)
    assert (answer.bytes, answer.compile_seconds, answer.error) == ({"temp": 3}, 1.5, "")
    assert json.loads(answer.module) == {
        "target": {
            "platform": "tpu",
            "topology": {"topology_name": "v5e:1x1", "chips_per_host_bounds": [1, 1, 1]},
        },
        "axes": [],
        "donated": [0],
        "options": {},
    }


def test_a_crash(folder, worker) -> None:
    worker("""
import sys
for line in ["I1122 noise", "WARNING: All log messages before absl", "", "W1122 noise"]:
    print(line, file=sys.stderr)
print(*range(10), sep="\\n", file=sys.stderr)
print("F1122 fatal", file=sys.stderr)
sys.exit(3)
""")
    assert failed() == (
        "step for target='tpu:v5e:1x1'\n"
        "  problem: the compiler exited with status 3; the end of its log:\n"
        "    3\n    4\n    5\n    6\n    7\n    8\n    9\n    F1122 fatal" + REMEDY
    )


def test_killed_worker_is_reported_with_its_signal(folder, worker) -> None:
    worker("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert failed() == (
        "step for target='tpu:v5e:1x1'\n  problem: the compiler was killed by SIGKILL" + REMEDY
    )


def test_no_answer(folder, worker) -> None:
    worker("")
    assert "the compiler exited with status 0" in failed()


def test_worker_past_its_time_limit_is_stopped_and_reported(folder, worker) -> None:
    worker("import time; time.sleep(60)")
    start = time.monotonic()
    assert failed(0.2) == (
        "step for target='tpu:v5e:1x1'\n  problem: the compiler took more than 0.2 s" + REMEDY
    )
    assert time.monotonic() - start < 50


def test_ctrl_c(folder, worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker("import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])")
    begun: list[subprocess.Popen] = []

    def wait(self, timeout=None):
        if self not in begun:
            begun.append(self)
            raise KeyboardInterrupt
        return before(self, timeout)

    before = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        remote.compile_there(LOWERED, parse_target("tpu:v5e:1x1"), 30)
    assert begun[0].returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(begun[0].pid, 0)


def test_after_a_failure_the_next_one_works(folder, worker) -> None:
    worker("import sys; sys.exit(1)")
    failed()
    worker(ANSWERS)
    assert remote.compile_there(LOWERED, parse_target("gpu:h100"), 30).bytes == {"temp": 3}


def test_the_environment_is_the_worker_s_own(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("JAX_DEBUG_NANS", "1")
    monkeypatch.setenv("XLA_FLAGS", "--a --xla_force_host_platform_device_count=8 --b")
    before = dict(os.environ)
    env = remote.environment(parse_target("cpu:2"), folder)
    assert dict(os.environ) == before
    assert (env["JAX_PLATFORMS"], env["JAX_NUM_CPU_DEVICES"]) == ("cpu", "2")
    assert "JAX_DEBUG_NANS" not in env
    assert env["XLA_FLAGS"].split() == ["--a", "--b"]
    assert env["TMPDIR"] == str(folder)
    assert env["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert "" not in env["PYTHONPATH"].split(os.pathsep)
