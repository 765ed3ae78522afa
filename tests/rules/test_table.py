"""The table is complete: every rule has a case, every primitive of JAX has a rule or a reason."""

import pytest

from tests.rules.test_rules import CASES
from xform._jax import primitives
from xform.table import RULES, Structured
