"""Every threshold of a verdict, in one place.

`python -m experiments.health.calibrate` chose them, on other seeds than those that `python -m
experiments.health.run` judges: each stands between what healthy models reach and what faults do.
Its table is in experiments/health/README.md.
"""

# An element is flat where its activation's slope is below this: tanh and sigmoid at 3 to 4 from 0.
FLAT = 0.02
# Share of units that are zero, with slope zero, for all examples.
DEAD = 0.98
# Share of elements that are flat.
SATURATED = 0.9
# How often larger, or smaller, a layer's result is to what it reads than with the median of its
# siblings: layers of the same operation and shape.
SCALE = 6.0
# How many siblings, itself included, that median takes.
SIBLINGS = 3
# The same where there are fewer, beside the median of layers of the same operation.
SCALE_COUSINS = 8.0
# The same where there are few of those too, beside 1.
SCALE_ALONE = 100.0
# Of a sum: the smallest operand to the largest, beside the median of its siblings.
LEAST = 1e-3
# The norm of the gradient at a layer to the largest at a later one.
VANISHED = 1e-5
# The norm of the gradient at a layer to that at the last.
EXPLODED = 1e5
# The cosine between the gradients of neighbours, to that of gradients that have nothing in common.
SHATTERED = 1.5
# That cosine at the last layer, below which it says nothing of those before.
TOGETHER = 0.5
# That of gradients that have nothing in common, above which they are of too few numbers to tell.
CHANCE = 0.15
