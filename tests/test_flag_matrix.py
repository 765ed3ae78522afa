"""An eighth of the tests of transforms, interpreter and rules, under each flag of the matrix."""

import subprocess
import sys
import tomllib

import pytest

from tests import flag_matrix, flags


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("cell", [cell for cell in flags.CELLS if cell != "none"])
def test_only_listed_tests_fail_under_each_flag(cell: str) -> None:
    command = [sys.executable, "-m", "tests.flag_matrix", cell, "every=8"]
    done = subprocess.run(command, cwd=flag_matrix.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr


def test_each_list_names_tests_that_exist() -> None:
    for cell, lists in tomllib.loads(flag_matrix.LISTS.read_text()).items():
        assert cell in flags.ALL
        for entry in lists:
            assert entry.keys() <= {"version", "because", "reason", "tests"}
            for pattern in entry["tests"]:
                path, name = pattern.split("::")
                assert f"def {name.split('[')[0]}(" in (flag_matrix.ROOT / path).read_text()
