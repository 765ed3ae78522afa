"""The tour: its listings are the commands' output, and the files that it names exist."""

import re
from pathlib import Path

import pytest

from xform import commands

ROOT = Path(__file__).parent.parent
TOUR = (ROOT / "xform/README.md").read_text()
BLOCKS = [
    re.sub("^    ", "", block, flags=re.MULTILINE).strip("\n")
    for block in re.findall(r"((?:^    .*\n|^\n(?=    ))+)", TOUR, re.MULTILINE)
]
SHOWN = [b for b in BLOCKS if b.startswith("$ python -m xform show two:")]


@pytest.mark.parametrize("shown", SHOWN, ids=range(len(SHOWN)))
def test_listings_of_the_tour_are_in_the_command_output(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module,) = [b for b in BLOCKS if "def loss(v, w, x)" in b]
    (tmp_path / "two.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    command, _, text = shown.partition("\n")
    printed = commands.run(command.removeprefix("$ python -m xform ").split())
    assert text.strip("\n") in "\n".join(line.rstrip() for line in printed.splitlines())


def test_all_stages_are_shown() -> None:
    assert len(SHOWN) == 4


def test_files_named_in_the_tour_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", TOUR)
    there = [ROOT, ROOT / "xform", ROOT / "xform/planner"]
    missing = [f for f in named if not any((folder / f).exists() for folder in there)]
    assert not missing
    assert len(named) > 40
