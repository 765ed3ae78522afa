"""Two processes read two halves of the batches of one process, and combine them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from models.data.batches import batches, mixed
from tests.models.data.test_batches import A, B
from tests.processes import ROOT, cpu_environment, free_port

PROGRAM = """
import json, sys
import jax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from models.data.batches import batches, mixed, share_of
from tests.models.data.test_batches import A, B

address, process = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, process)
mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
sharding = NamedSharding(mesh, P(None, "data"))
share = share_of(sharding, 8)
iterator = batches(mixed((A, B), (2, 1), 0), batch=8, slices=2, share=share, sharding=sharding)
some = [next(iterator)["y"] for _ in range(3)]
whole = [multihost_utils.process_allgather(x, tiled=True).tolist() for x in some]
print(json.dumps([share.process, share.processes, iterator.get_state(), whole]), flush=True)
"""


@pytest.mark.slow
def test_two_processes_have_the_batches_of_one() -> None:
    address, environment = f"localhost:{free_port()}", cpu_environment(2)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(process)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    said = [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in started]
    iterator = batches(mixed((A, B), (2, 1), 0), batch=8, slices=2)
    expected = np.stack([next(iterator)["y"] for _ in range(3)])
    for number, (process, processes, _, whole) in enumerate(said):
        assert (process, processes) == (number, 2)
        np.testing.assert_array_equal(whole, expected)
    assert said[0][2] == said[1][2]
