"""Arrays of a process, by the line that made them: from JAX's own profile of device memory."""

import gc

import jax
import jax.numpy as jnp

from xform.memory.held_arrays import held_arrays


def here(held) -> dict[str, tuple[int, int]]:
    return {x.where.rpartition(" ")[2]: (x.bytes, x.count) for x in held if __file__ in x.where}


def test_arrays_are_named_by_their_line() -> None:
    def small():
        return jax.block_until_ready(jnp.ones((16, 16)))

    def large():
        made = []
        for _ in range(3):
            made.append(jax.block_until_ready(jnp.ones((64, 64))))
        return made

    gc.collect()
    before = held_arrays()
    arrays = small(), large()
    held = held_arrays()
    found = here(held)
    assert found["(small)"] == (1024, 1)
    assert found["(large)"] == (3 * 64 * 64 * 4, 3)
    total = lambda of: sum(x.bytes for x in of)
    assert total(held) - total(before) == sum(x.nbytes for x in jax.tree.leaves(arrays))
    assert [x.bytes for x in held] == sorted((x.bytes for x in held), reverse=True)
    del arrays
    gc.collect()
    assert total(held_arrays()) == total(before)
