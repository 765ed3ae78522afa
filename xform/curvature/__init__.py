"""Products with curvature matrices, and what is computed from them alone.

`Hessian(f)`, `GaussNewton(model, loss)` and `Fisher(model, distribution)` are what `hutchinson`,
`hessian_spectrum` and `newton_step` can be asked about; the other classes are what they return.
"""

from xform.curvature.hutchinson import TraceAndDiagonal
from xform.curvature.matrices import Fisher, GaussNewton, Hessian, Matrix
from xform.curvature.newton import Step
from xform.curvature.spectrum import Spectrum

__all__ = ["Fisher", "GaussNewton", "Hessian", "Matrix", "Spectrum", "Step", "TraceAndDiagonal"]
