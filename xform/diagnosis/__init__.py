"""Diagnosis of models that do not train: statistics of each layer, and which layer is at fault.

`xform.health` diagnoses a loss once. In your own training loop, use a `Diagnosis` of the loss in
place of `xform.value_and_grad`, in the steps that you want to diagnose:

    diagnosis = Diagnosis(loss, params, batch)  # finds the layers; runs nothing
    value, grads, readings = diagnosis.value_and_grad(params, batch)  # in a jitted step
    print(diagnosis.report([value], readings))

For long runs, a `HealthStream` writes such a report every few steps and alerts, and
`HealthHistory` plots the file over the steps.
"""

from xform.diagnosis.alerts import Alert as Alert
from xform.diagnosis.alerts import AlertLimits as AlertLimits
from xform.diagnosis.diagnosis import Diagnosis as Diagnosis
from xform.diagnosis.history import HealthHistory as HealthHistory
from xform.diagnosis.report import Report as Report
from xform.diagnosis.stream import HealthStream as HealthStream
