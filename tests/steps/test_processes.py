"""Several processes: one plan, which the first process decides and keeps on its disk."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.processes import cpu_environment, free_port
from xform.steps import processes as agreement

DEVICES = 8

PROGRAM = """
import json, sys
import jax
port, processes, process, folder = sys.argv[1:]
if int(processes) > 1:
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import xform

mesh = Mesh(np.array(jax.devices()), ("data",))

def put(array, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

def loss(ws, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, ws)[0] ** 2)

def step(ws, x):
    value, grads = xform.value_and_grad(loss)(ws, x)
    return ws - 0.1 * grads, value

ws = put(np.full((12, 64, 64), 1 / 64, np.float32), PartitionSpec())
x = put(np.ones((1024, 64), np.float32), PartitionSpec("data"))
fast = xform.jit(step, "budget:800KiB", donate_argnums=0, plans=folder)
losses = []
for _ in range(3):
    ws, value = fast(ws, x)
    losses.append(float(value))
plan = fast.plan
record = json.dumps({key: one.to_dict() for key, one in plan.plans.items()}, sort_keys=True)
print(json.dumps([plan.compiled_bytes, plan.recompute_flops, record, losses, plan.seconds > 0]))
"""


def results(processes: int, folder: Path) -> list[list[Any]]:
    """Run the program in some processes, each with a folder of its own; return what each prints."""
    port, environment = free_port(), cpu_environment(DEVICES // processes)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, (port, processes, i, folder / str(i)))],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(processes)
    ]  # fmt: skip
    try:
        found: list[list[Any]] = []
        for process in started:
            out, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            found.append(json.loads(out.splitlines()[-1]))
        return found
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("size", [0, 3, 4, 9])
def test_values_are_those_of_the_first_process(size: int, monkeypatch: Any) -> None:
    """Bytes travel as whole words of 32 bits, in arrays of one size in all processes."""
    first, sent = bytes(range(1, size + 1)), list[Any]()

    def broadcast(data: np.ndarray) -> np.ndarray:
        """Return what the first process would send, whose file has `size` bytes."""
        assert data.dtype == np.int32
        sent.append(data.tobytes())
        if len(sent) == 1:
            return np.frombuffer(struct.pack("<d", float(size)), np.int32)
        return np.frombuffer(first.ljust(data.nbytes, b"\0"), np.int32)

    assert agreement.agreed_bytes(first) == first
    assert agreement.agreed(2.5) == 2.5
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement.multihost_utils, "broadcast_one_to_all", broadcast)
    assert agreement.agreed_bytes(b"a longer file of this process") == first
    assert [len(data) for data in sent] == ([8, -(-size // 4) * 4] if size else [8])
    sent.clear()
    number = agreement.agreed(True)
    assert number is bool(size)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_have_one_plan_and_a_resumed_run_finds_it(tmp_path: Path) -> None:
    (one,) = results(1, tmp_path / "one")
    for processes in (2, 4):
        folder = tmp_path / str(processes)
        new = results(processes, folder)
        assert [[bytes_, flops, losses] for bytes_, flops, _, losses, _ in new] == [
            [one[0], one[1], one[3]]
        ] * processes
        assert len({record for _, _, record, _, _ in new}) == 1
        assert all(searched for *_, searched in new)
        assert sorted(path.name for path in folder.iterdir()) == ["0"]  # the first one's disk
        resumed = results(processes, folder)
        assert [x[:4] for x in resumed] == [x[:4] for x in new]
        assert not any(searched for *_, searched in resumed)
