"""Cases of `xform.rules.fft`. XLA's transforms take float32 and float64 only."""

import numpy as np
from jax import lax

from xform.testing import Case

RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, 4, 6))
ODD = RNG.normal(size=(3, 5))
KINDS = lax.FftType


def transform(kind, *lengths):
    def fun(x):
        if kind == KINDS.IRFFT:
            shape = (*x.shape[:-1], lengths[-1] // 2 + 1)
            x = lax.complex(*(lax.slice(v, (0,) * x.ndim, shape) for v in (x, x * x)))
        elif kind != KINDS.RFFT and x.dtype.kind == "f":
            x = lax.complex(x, x * x)
        y = lax.fft(x, kind, lengths)
        return (lax.real(y), lax.imag(y)) if y.dtype.kind == "c" else y

    return fun


def case(kind, x, *lengths, **kwargs):
    label = f"{kind.name} {lengths}"
    return Case("fft", transform(kind, *lengths), (x,), label=label, bfloat16=False, **kwargs)


CASES = [
    case(KINDS.FFT, X, 6, complex=True),
    case(KINDS.FFT, X, 4, 6),
    case(KINDS.IFFT, X, 6, complex=True),
    case(KINDS.IFFT, X, 2, 4, 6),
    case(KINDS.RFFT, X, 6),
    case(KINDS.RFFT, X, 4, 6),
    case(KINDS.RFFT, ODD, 5),
    case(KINDS.RFFT, ODD[:, :1], 1),
    case(KINDS.IRFFT, X, 6),
    case(KINDS.IRFFT, X, 4, 6),
    case(KINDS.IRFFT, ODD, 5),
    case(KINDS.IRFFT, ODD, 2),
    case(KINDS.IRFFT, ODD, 1),
    case(KINDS.FFT, X[:0], 6),
]
