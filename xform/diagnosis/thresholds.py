"""All thresholds of the verdicts on layers.

Siblings are layers with the same operation and shapes. The gain of a layer is the root mean square
of its product, before bias and activation, divided by that of its input.

Each threshold lies between the values of healthy models and the values at planted faults. They were
chosen with `python -m experiments.health.calibrate`, on other seeds than `python -m
experiments.health.run` uses to test them. The table is in experiments/health/README.md.
"""

# An element is saturated if the slope of its activation is below this: for tanh and sigmoid, at
# inputs further than 3 to 4 from 0.
FLAT_SLOPE = 0.02
# A layer is dead if at least this share of its units are zero, with slope zero, for all examples.
DEAD_SHARE = 0.98
# A layer is saturated if at least this share of its elements are.
SATURATED_SHARE = 0.9
# Largest factor between a layer's gain and the median gain of its siblings.
GAIN_FACTOR = 6.0
# Least number of siblings, including the layer itself, for using their median.
MIN_SIBLINGS = 3
# Largest factor between a layer's gain and the median gain of layers with the same operation. This
# limit is used if the layer has too few siblings.
GAIN_FACTOR_BY_OPERATION = 8.0
# Largest factor between a layer's gain and 1. This limit is used if there are also too few layers
# with the same operation.
GAIN_FACTOR_ALONE = 100.0
# For a sum: least ratio of its smallest to its largest operand, as a fraction of the median of this
# ratio over the sum and its siblings.
OPERAND_RATIO = 1e-3
# Least ratio of the gradient norm at a layer to the largest gradient norm at a later layer.
VANISHED_RATIO = 1e-5
# Largest ratio of the gradient norm at a layer to the gradient norm at the last layer.
EXPLODED_RATIO = 1e5
# Least ratio of the cosine between gradients of neighbouring examples to the cosine of random
# gradients.
SHATTERED_FACTOR = 1.5
# If the cosine between gradients of neighbouring examples at the last layer is below this, no layer
# is called shattered.
MIN_LAST_COSINE = 0.5
# If the cosine of random gradients is above this, the gradients have too few elements to judge.
MAX_RANDOM_COSINE = 0.15
