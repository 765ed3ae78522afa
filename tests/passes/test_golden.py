"""The result of each pass as text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from xform import passes
from xform.program import ir

X = np.ones((2, 3), np.float32)


def called(x):
    g = jax.jit(lambda x: jnp.sin(x))
    return [jax.jit(lambda x: g(x) * 2.0)(x)]


def marked(x):
    """Regions in a region, in a loop, with a policy and a name; the jitted call stays."""
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    inner = jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "kept"), policy=policy)
    twice = jax.checkpoint(lambda x: inner(jax.jit(lambda x: x * 2.0)(x)))
    return [lax.scan(lambda x, _: (twice(x), None), x, None, length=3)[0]]


def dead(x):
    jnp.cos(x)

    def step(carry, s):
        a, b, c = carry
        return (a * s, b + c, c * 2.0), (a, b)

    start = (x, x, x)
    (a, _, _), (_, b) = lax.scan(step, start, jnp.ones(4, np.float32))
    del b
    return [a]


def common(x):
    key = jax.random.key(0)
    a, b = jax.random.bits(key, (2,)), jax.random.bits(key, (2,))
    return [jnp.sin(x) + jnp.sin(x), a, b, x + 0.0, x + -0.0]


def constants(x):
    return [x * jnp.sin(jnp.arange(3, dtype=np.float32)), jnp.cos(jnp.float32(2.0)) + 1.0]


def algebra(x):
    y = jnp.negative(-x) * 1.0
    z = (x + 0.0) + (x - 0.0)
    return [y, z, x.T.T, x.reshape(6).reshape(3, 2), x.astype(np.float16), jnp.abs(-x)]


def exact(x):
    half = x.astype(np.float16)
    return [half.astype(np.float32).astype(np.float16), x.astype(np.float16).astype(np.float32)]


def nested(x):
    """The same simplification in a loop, in a branch and in a call."""
    tidy = lambda x: jnp.sin(jnp.negative(-x)) + jnp.sin(x) * jnp.cos(jnp.float32(0.0))

    def step(carry):
        i, x = carry
        return i + 1, tidy(x)

    _, y = lax.while_loop(lambda c: c[0] < 3, step, (0, x))
    return [lax.cond(y[0, 0] > 1, tidy, jax.jit(lambda x: x), y)]


def summed(x):
    """Of the stacked results, one is added to an array, and one is read twice."""
    total = jnp.zeros((4, 2, 3), np.float32)
    y, (a, b) = lax.scan(lambda y, s: (y * s, (y + s, y - s)), x, jnp.ones(4, np.float32))
    return [y, total + a, b + b]


ALL = passes.Pipeline([p() for p in passes.PASSES.values()])

GOLDEN = {
    (passes.Inline(), called): """\
inputs  a:f32[2,3]
  b:f32[2,3] = sin a
  c:f32[2,3] = mul b 2.0
outputs c""",
    (passes.OpenRegions(), marked): """\
inputs  a:f32[2,3]
  b:f32[2,3] = scan[length=3] a
    body: c:f32[2,3]
      d:f32[2,3] = jit[name=<lambda>] c
        body: e:f32[2,3]
          f:f32[2,3] = mul e 2.0
        return f
      g:f32[2,3] = sin d
      h:f32[2,3] = name[name=kept] g
    return h
outputs b""",
    (passes.Dce(), dead): """\
inputs  a:f32[2,3]
  b:f32[4] = broadcast_in_dim[shape=(4,)] 1.0
  c:f32[2,3] = scan[length=4] a b
    body: d:f32[2,3] e:f32[]
      f:f32[2,3] = mul d e
    return f
outputs c""",
    (passes.Cse(), common): """\
inputs  a:f32[2,3]
  b:key<fry>[] = random_seed 0
  c:u32[2] = random_bits[bit_width=32, shape=(2,)] b
  d:f32[2,3] = sin a
  e:f32[2,3] = add d d
  f:f32[2,3] = add a 0.0
  g:f32[2,3] = add a -0.0
outputs e c c f g""",
    (passes.Fold(), constants): """\
inputs  a:f32[2,3]
consts  b:f32[1,3]
  c:f32[2,3] = mul a b
outputs c 0.5838531""",
    (passes.SumInLoops(), summed): """\
inputs  a:f32[2,3]
  b:f32[4,2,3] = broadcast_in_dim[shape=(4,2,3)] 0.0
  c:f32[4] = broadcast_in_dim[shape=(4,)] 1.0
  d:i32[4] = iota[dtype=int32, shape=(4,), dimension=0]
  e:f32[2,3] f:f32[4,2,3] g:f32[4,2,3] = scan[length=4] a b d c
    body: h:f32[2,3] i:f32[4,2,3] j:i32[] k:f32[]
      l:f32[2,3] = mul h k
      m:f32[2,3] = add h k
      n:f32[2,3] = sub h k
      o:f32[2,3] = jit[name=dynamic_index_in_dim] i j
        body: p:f32[4,2,3] q:i32[]
          r:f32[1,2,3] = dynamic_slice[slice_sizes=(1,2,3)] p q 0 0
          s:f32[2,3] = squeeze[dimensions=(0,)] r
        return s
      t:f32[2,3] = add o m
      u:f32[4,2,3] = jit[name=dynamic_update_index_in_dim] i t j
        body: v:f32[4,2,3] w:f32[2,3] x:i32[]
          y:f32[1,2,3] = broadcast_in_dim[shape=(1,2,3), broadcast_dimensions=(1,2)] w
          z:f32[4,2,3] = dynamic_update_slice v y x 0 0
        return z
    return l u n
  aa:f32[4,2,3] = add g g
outputs e f aa""",
    (passes.Simplify(), algebra): """\
inputs  a:f32[2,3]
  b:f32[2,3] = neg a
  c:f32[2,3] = add a 0.0
  d:f32[2,3] = add c a
  e:f32[3,2] = transpose[permutation=(1,0)] a
  f:f32[6] = reshape[new_sizes=(6,)] a
  g:f32[3,2] = reshape[new_sizes=(3,2)] a
  h:f16[2,3] = convert_element_type[new_dtype=float16] a
  i:f32[2,3] = neg a
  j:f32[2,3] = abs a
outputs a d a g h j""",
    (passes.Pipeline([passes.Simplify(), passes.Dce()]), exact): """\
inputs  a:f32[2,3]
  b:f16[2,3] = convert_element_type[new_dtype=float16] a
  c:f16[2,3] = convert_element_type[new_dtype=float16] a
  d:f32[2,3] = convert_element_type[new_dtype=float32] c
outputs b d""",
    (passes.Pipeline([passes.Simplify(), passes.Cse(), passes.Dce()]), nested): """\
inputs  a:f32[2,3]
  b:i32[] c:f32[2,3] = while 0 a
    condition: d:i32[] e:f32[2,3]
      f:bool[] = lt d 3
    return f
    body: g:i32[] h:f32[2,3]
      i:i32[] = add g 1
      j:f32[2,3] = sin h
      k:f32[] = cos 0.0
      l:f32[2,3] = mul j k
      m:f32[2,3] = add j l
    return i m
  n:f32[1,1] = slice[start_indices=(0,0), limit_indices=(1,1)] c
  o:f32[] = squeeze[dimensions=(0,1)] n
  p:bool[] = gt o 1.0
  q:i32[] = convert_element_type[new_dtype=int32] p
  r:f32[2,3] = cond q c
    branch 0: s:f32[2,3]
      t:f32[2,3] = jit[name=<lambda>] s
        body: u:f32[2,3]
        return u
    return t
    branch 1: v:f32[2,3]
      w:f32[2,3] = sin v
      x:f32[] = cos 0.0
      y:f32[2,3] = mul w x
      z:f32[2,3] = add w y
    return z
outputs r""",
    (ALL, nested): """\
inputs  a:f32[2,3]
  b:i32[] c:f32[2,3] = while 0 a
    condition: d:i32[] e:f32[2,3]
      f:bool[] = lt d 3
    return f
    body: g:i32[] h:f32[2,3]
      i:i32[] = add g 1
      j:f32[2,3] = sin h
      k:f32[2,3] = add j j
    return i k
  l:f32[1,1] = slice[start_indices=(0,0), limit_indices=(1,1)] c
  m:f32[] = squeeze[dimensions=(0,1)] l
  n:bool[] = gt m 1.0
  o:i32[] = convert_element_type[new_dtype=int32] n
  p:f32[2,3] = cond o c
    branch 0: q:f32[2,3]
    return q
    branch 1: r:f32[2,3]
      s:f32[2,3] = sin r
      t:f32[2,3] = add s s
    return t
outputs p""",
}


@pytest.mark.parametrize(("made", "f"), GOLDEN, ids=lambda x: getattr(x, "__name__", ""))
def test_golden(made, f) -> None:
    prog = ir.trace(f, X)
    assert passes.listing(made(prog)) == GOLDEN[made, f]
