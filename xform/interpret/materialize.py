"""`materialize`: an identity whose result a compiler has to write to memory.

A compiler that fuses what makes a saved value into all of its readers writes no such value: it
keeps what the value is made from. Of a dropout mask that is two arrays of random bits, of four
bytes for each of the mask's. GPUs keep an optimization barrier until fusion is done; on CPU a loop
that never runs has its state in memory, and starts from it in place: its condition is one that the
compiler cannot know. On TPUs it is nothing: their compiler makes random bits again for each reader,
from their key, and keeps neither bits nor mask.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._jax import Primitive, ad, batching, mlir
from xform.arithmetic import Value
from xform.interpret.barrier import Where, holds, lowered_plainly, opaque_true
from xform.reach import EACH
from xform.traits import Traits
from xform.words import linear

materialize_p = Primitive("xform_materialize")
materialize_p.def_impl(lambda x, where: x)
materialize_p.def_abstract_eval(lambda x, where: x)


def materialize(x: Value, where: Where = "everywhere") -> Value:
    """`x`, in memory. Costs a write, and that readers are not fused with what makes it."""
    plain = x.size and jnp.issubdtype(x.dtype, jnp.generic)
    return materialize_p.bind(x, where=where) if plain else x


def _loop(x: Value, where: Where) -> Value:
    if not holds(where, "cpu"):
        return x
    never = lax.bitwise_not(opaque_true(x))
    step = lambda state: (lax.full_like(never, False), lax.full_like(state[1], 0))
    return lax.while_loop(lambda state: state[0], step, (never, x))[1]


def _barrier(x: Value, where: Where) -> Value:
    return lax.optimization_barrier(x) if holds(where, "gpu") else x


mlir.register_lowering(materialize_p, lowered_plainly(_loop, several=False), platform="cpu")
mlir.register_lowering(materialize_p, lowered_plainly(_barrier, several=False))
mlir.register_lowering(materialize_p, lowered_plainly(lambda x, where: x, several=False),
                       platform="tpu")  # fmt: skip
batching.defvectorized(materialize_p)


def _jvp(primals: Any, tangents: Any, *, where: Where) -> Any:
    return materialize_p.bind(*primals, where=where), tangents[0]


ad.primitive_jvps[materialize_p] = _jvp
ad.primitive_transposes[materialize_p] = lambda ct, x, *, where: [ct]
linear(materialize_p, lambda ct, x, *, where: ct, traits=Traits(
    "movement", identity=True, reach=EACH))  # fmt: skip
