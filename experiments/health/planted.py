"""Plant faults at one layer of a network: does `health` find the fault there and nowhere else?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.health.networks import NETWORKS, Network
from xform.diagnosis.diagnosis import Diagnosis
from xform.diagnosis.row import LayerHealth

# The number of places of a missing path; each needs a compilation.
PLACES = 3
# Compile fast: nothing is timed here.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def diagnosis(name: str, bare: int = -1) -> tuple[Diagnosis, Callable[[Any, Any], Any]]:
    """Return the diagnosis of a network, and its compiled evaluation."""
    network = NETWORKS[name]
    key = jax.random.key(0)
    loss = lambda params, batch: network.loss(params, batch, bare)
    of = Diagnosis(loss, network.init(key), network.batch(key))
    read = jax.jit(lambda p, b: of.value_and_grad(p, b, key)[2], compiler_options=FAST)
    return of, read


def rows(name: str, params: Any, batch: Any, bare: int = -1) -> list[LayerHealth]:
    """Return the judged rows of a network."""
    of, read = diagnosis(name, bare)
    return of.with_verdicts(jax.device_get(read(params, batch)))


def places(network: Network) -> list[int]:
    """Return the places where residual paths are removed, evenly over the layers that may fail."""
    first, last = network.first, network.last
    return sorted({round(x) for x in np.linspace(first, last - 1, PLACES)})


def plant(name: str, fault: str, seed: int) -> tuple[list[LayerHealth], int]:
    """Return the judged rows of a network with a fault from a seed, and the layer of the fault."""
    network = NETWORKS[name]
    random = np.random.default_rng(seed)
    params, batch = network.init(jax.random.key(seed)), network.batch(jax.random.key(seed + 1))
    at = int(random.integers(network.first, network.last))
    by = float(10 ** random.uniform(1, 2))
    written = fault == "bare" and name != "RNN-200"
    if written:
        at = int(random.choice(places(network)))
    params, batch = network.break_(params, batch, fault, at, by)
    return rows(name, params, batch, at if written else -1), at


def found(name: str, judged: list[LayerHealth], at: int) -> bool:
    """Return whether the report names the faulty layer, and no other."""
    faults = [row for row in judged if row.verdict != "fine"]
    return bool(faults) and all(NETWORKS[name].there(row, at) for row in faults)
