"""The rule of discrete Fourier transforms. They are linear.

`_transpose` returns the cotangent of the input. In comments, x' is the cotangent of the input and
y' that of the output.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn
from xform.interpret import cost
from xform.program.dimensions import product, shape
from xform.registry.ends import Ends
from xform.registry.traits import Traits, with_ends
from xform.registry.words import linear


def _transpose(ct: Any, x: Any, *, fft_type: lax.FftType, fft_lengths: tuple[int, ...]):
    if fft_type in (lax.FftType.FFT, lax.FftType.IFFT):  # its matrix is symmetric
        return lax.fft(ct, fft_type, fft_lengths)
    if fft_type == lax.FftType.RFFT:
        # y is FFT(x) without the redundant half. So x' = real(FFT(y' with zeros in that half)).
        missing = fft_lengths[-1] - ct.shape[-1]
        padding = [(0, 0, 0)] * (ct.ndim - 1) + [(0, missing, 0)]
        full = lax.pad(ct, np.zeros((), ct.dtype), padding)
        return lax.real(lax.fft(full, lax.FftType.FFT, fft_lengths))
    # IRFFT. The input is half of a spectrum: the other half is its conjugate. So each frequency
    # counts twice, except the frequency 0 and, for an even length, the last one.
    half = lax.fft(ct, lax.FftType.RFFT, fft_lengths)
    weights = np.full(half.shape[-1:], 2.0 / np.prod(fft_lengths), half.dtype)
    weights[:1] /= 2
    if fft_lengths[-1] % 2 == 0:
        weights[-1:] /= 2
    return lax.mul(lax.conj(half), lax.broadcast_in_dim(weights, half.shape, (half.ndim - 1,)))


def _flops(eqn: JaxprEqn) -> float:
    """Return 5 n log2(n) for each complex signal of n elements, half of it for a real one."""
    kind, n = eqn.params["fft_type"], product(eqn.params["fft_lengths"])
    real = kind.name in ("RFFT", "IRFFT")
    signal = eqn.invars[0] if kind.name != "IRFFT" else eqn.outvars[0]
    return (2.5 if real else 5) * cost.size(signal) * math.log2(n) if n else 0


def _ends(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay except the transformed ones, which are the last."""
    n = len(shape(eqn.invars[0]))
    return [tuple(i if i < n - len(eqn.params["fft_lengths"]) else None for i in range(n))]


linear("fft", _transpose, traits=with_ends(Traits(flops=_flops), _ends))
