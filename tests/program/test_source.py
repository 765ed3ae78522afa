"""Lines of the user's code."""

import numpy as np
import pytest

from xform.program.source import line_of_error


def test_the_line_of_an_error_is_that_of_the_model() -> None:
    def fails():
        return np.linalg.inv(np.ones((2, 3)))

    with pytest.raises(np.linalg.LinAlgError) as caught:
        fails()
    line = fails.__code__.co_firstlineno + 1
    assert line_of_error(caught.value) == f"{__file__}:{line} (fails)"


def test_an_error_of_a_library_that_xform_calls_has_no_line() -> None:
    with pytest.raises(np.linalg.LinAlgError) as caught:
        np.linalg.inv(np.ones((2, 3)))
    assert caught.value.__traceback__ is not None
    within_numpy = caught.value.__traceback__.tb_next
    assert line_of_error(caught.value.with_traceback(within_numpy)) == ""
