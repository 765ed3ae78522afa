"""Products of curvature matrices with vectors; estimates and steps that need only such products.

`hutchinson`, `hessian_spectrum` and `newton_step` accept the matrices `Hessian(f)`,
`GaussNewton(model, loss)` and `Fisher(model, distribution)`. `Spectrum`, `SecondOrderStep` and
`TraceAndDiagonal` are results.
"""

from xform.curvature.matrices import Fisher, GaussNewton, Hessian, Matrix
from xform.curvature.newton import SecondOrderStep, natural_gradient_step, newton_step
from xform.curvature.products import fisher_vp, ggnvp
from xform.curvature.spectrum import Spectrum, hessian_spectrum
from xform.curvature.trace import TraceAndDiagonal, hutchinson

__all__ = [
    "Fisher",
    "GaussNewton",
    "Hessian",
    "Matrix",
    "SecondOrderStep",
    "Spectrum",
    "TraceAndDiagonal",
    "fisher_vp",
    "ggnvp",
    "hessian_spectrum",
    "hutchinson",
    "natural_gradient_step",
    "newton_step",
]
