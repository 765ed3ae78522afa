"""Matrix-vector products with curvature matrices, and estimates and steps that need only those.

`hutchinson`, `hessian_spectrum` and `newton_step` accept the matrices `Hessian(f)`,
`GaussNewton(model, loss)` and `Fisher(model, distribution)`. They return the other classes.
"""

from xform.curvature.hutchinson import TraceAndDiagonal
from xform.curvature.matrices import Fisher, GaussNewton, Hessian, Matrix
from xform.curvature.newton import Step
from xform.curvature.spectrum import Spectrum

__all__ = ["Fisher", "GaussNewton", "Hessian", "Matrix", "Spectrum", "Step", "TraceAndDiagonal"]
