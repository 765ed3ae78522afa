"""Why does it not train? Each layer's activations and gradients, and what is wrong with them.

`xform.health` asks once. In a training loop of one's own a `Diagnosis` of the loss takes the place
of `xform.value_and_grad` in the steps that are to be looked at:

    of = Diagnosis(loss, params, batch)  # finds the layers; nothing is run
    value, grads, read = of.value_and_grad(params, batch, key)  # in a jitted step
    print(of.report([value], read))
"""

from xform.diagnosis.diagnosis import Diagnosis as Diagnosis
from xform.diagnosis.report import Report as Report
