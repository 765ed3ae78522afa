"""Sweeps of what a user may get wrong: a full disk, data of another kind, options that are none."""

import argparse
import ast
import builtins
import errno
import io
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from models import program
from models.__main__ import main
from models.errors import InputError
from models.nets.presets import TRAINED
from models.run import data as data_command
from models.run import demo, export, generate
from models.run.flags import Parser
from models.run.train import configured, parser
from models.train import loop
from models.train.kinds import of_preset
from tests.models.micro import FLAGS, TEXT

ROOT = Path(__file__).parents[3]

# A disk that is full when the run begins. Orbax's own files are in `test_commands.py`.


class Disk:
    """A disk that is full from one write on: each file or folder in `folder` that is made counts.

    Attributes:
      full_at: the number of the write that fails; each counts from 1.
      failed: the file or folder that it was.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.full_at, self.count, self.failed = str(folder), 0, 0, ""
        real_open, real_mkdir = io.open, os.mkdir

        def opened(file, mode="r", *args, **options):
            if set(mode) & set("wax+") and self._fails(file):
                # The kernel's own answer, also to what NumPy writes by itself.
                return real_open("/dev/full", mode.replace("x", "w"), *args, **options)
            return real_open(file, mode, *args, **options)

        def mkdir(path, *args, **options):
            if not os.path.isdir(path) and self._fails(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real_mkdir(path, *args, **options)

        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(os, "mkdir", mkdir)

    def _fails(self, path: object) -> bool:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self.folder):
            return False
        self.count += 1
        if self.count == self.full_at:
            self.failed = os.fspath(path)
        return self.count == self.full_at


class Begun(Exception):
    """The run is at its first step."""


@pytest.mark.parametrize(
    "extra", [[], ["--tokenizer", "bpe:300"], ["--health-every", "1"]], ids=str
)
def test_each_write_at_the_start_of_a_run_on_a_full_disk(
    extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    (tmp_path / "text").write_bytes(TEXT)
    made: list[object] = []

    def plan_step(*args: object) -> object:
        made[:] = made or [planned(*args)]
        return made[0]

    def begin(*_: object) -> None:
        raise Begun

    planned = loop.plan_step
    monkeypatch.setattr(loop, "plan_step", plan_step)
    monkeypatch.setattr(loop, "_Loop", begin)
    words = ["train", *FLAGS, *extra, "--data", str(tmp_path / "text"), "--out", str(out)]
    disk = Disk(out, monkeypatch)
    failed: list[str] = []
    for number in itertools.count(1):
        shutil.rmtree(out, ignore_errors=True)
        disk.full_at, disk.count, disk.failed = number, 0, ""
        try:
            code = main(words)
        except Begun:
            if disk.failed:  # a log that is open, and written to later
                continue
            break
        said = capsys.readouterr().err
        assert code == 2, disk.failed
        assert said.count("\n") == 1
        assert said.startswith("error: cannot ")
        assert str(out) in said
        assert "standard output" not in said
        # `/dev/full` takes a file of no bytes, and then refuses to be truncated or brought to disk.
        assert "No space left on device" in said or "Invalid argument" in said
        failed.append(disk.failed.removeprefix(str(out)))
    assert len(failed) >= 6
    for name in ("", "/lock", "/checkpoints", "/config.toml.partial", "/log.jsonl.partial"):
        assert name in failed
    assert any("plan" in name for name in failed)
    if extra:
        assert any("/data/" in name or "health" in name for name in failed)


# Presets on data of other kinds.


@pytest.fixture(scope="module")
def every_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = pytest.importorskip("PIL.Image")
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "text.txt").write_bytes(TEXT)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.py").write_bytes(TEXT)
    (folder / "lines.jsonl").write_text('{"text": "def f(): return 1"}\n' * 50)
    for kind in ("a", "b"):
        (folder / "classes" / kind).mkdir(parents=True)
        for i in range(4):
            picture = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            image.fromarray(picture).save(folder / "classes" / kind / f"{i}.png")
    (folder / "arrays").mkdir()
    np.save(folder / "arrays/images.npy", rng.integers(0, 255, (9, 8, 8, 3), dtype=np.uint8))
    np.save(folder / "arrays/labels.npy", rng.integers(0, 3, 9, dtype=np.int32))
    np.save(folder / "series.npy", rng.normal(size=(4, 200, 2)).astype(np.float32))
    (folder / "empty").mkdir()
    (folder / "nothing").write_bytes(b"")
    return folder


KINDS = {
    "text": ("text.txt", "texts", "lines.jsonl"),
    "pictures": ("classes", "arrays"),
    "series": ("series.npy",),
    "": ("empty", "nothing", "absent"),
}
SAYS = {
    "text": r"is not text: .*: python -m models train has a --preset for each kind of data",
    "pictures": r"is not a folder of pictures: name a folder that holds one folder"
    r"|holds no pictures: give it a folder of pictures per class",
    "series": r"is a folder, but series are in one \.npy file|it is not a \.npy file|it is empty",
}


@pytest.mark.parametrize("preset", TRAINED)
def test_a_preset_refuses_each_other_kind_of_data(preset: str, every_data: Path) -> None:
    on = of_preset(preset).on
    others = [(kind, name) for kind, names in KINDS.items() if kind != on for name in names]
    for kind, name in others:
        given = {"config": None, "preset": preset, "data": [str(every_data / name)]}
        given["out"] = str(every_data / "run")
        with pytest.raises(InputError) as caught:
            configured(given, resuming=False).load()
        said = str(caught.value)
        assert "\n" not in said
        assert str(every_data / name) in said
        if kind:
            assert re.search(SAYS[on], said), (preset, name, said)
        else:
            assert re.search(f"no such file|is empty: name files|{SAYS[on]}", said), (
                preset,
                name,
                said,
            )


# Options that a message advises are options of the command that says it.

OPTION = re.compile(r"(?<![\w=-])--[a-z][a-z-]*")
COMMANDS = {
    "train": None,
    "data": data_command,
    "generate": generate,
    "export": export,
    "demo": demo,
}


def options_of(name: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    if name == "train":
        return {*parser()._option_string_actions}
    found: list[argparse.ArgumentParser] = []

    def parse(self: Parser, _: object) -> None:
        found.append(self)
        raise Begun

    monkeypatch.setattr(Parser, "parse", parse)
    with pytest.raises(Begun):
        COMMANDS[name].main([])
    return {*found[0]._option_string_actions}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Texts that a module may show: all but its docstrings."""
    tree = ast.parse(path.read_text())
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [n.body[0] for n in ast.walk(tree) if isinstance(n, scopes) and n.body]
    formatted = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    left_out = {id(e.value) for e in first if isinstance(e, ast.Expr)}
    left_out |= {id(part) for node in formatted for part in ast.walk(node)}
    for node in formatted:
        yield node.lineno, ast.unparse(node).replace("{program.NAME}", program.NAME)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in left_out:
            yield node.lineno, node.value


def test_every_option_that_the_trainers_messages_advise_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        options = {name: options_of(name, patch) for name in COMMANDS}
    shown = 0
    for path in sorted((ROOT / "models").rglob("*.py")):
        name = path.relative_to(ROOT / "models").as_posix()
        command = path.stem if name.startswith("run/") and path.stem in COMMANDS else "train"
        known = options[command] | {"--help"}
        known |= {"--platform"} if name == "nets/exported.py" else set()  # `export` alone says it
        for line, text in texts(path):
            named = options["train"] if "python -m models train" in text else set()
            for option in OPTION.findall(text):
                shown += 1
                assert option in known | named, f"{name}:{line} advises {option}"
    assert shown > 60


@pytest.mark.parametrize("option", [["--target", "gpu:h100"], ["--capacity", "8GiB"]])
def test_a_run_that_trains_takes_no_target(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--preset", "tiny", "--out", str(tmp_path / "run"), *option]) == 2
    assert "add --dry-run or --largest-batch" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_data_command_advises_its_own_options(
    every_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        known = {name: options_of(name, patch) for name in ("train", "data")}
    names = [name for kind, names in KINDS.items() if kind != "text" for name in names]
    for name in (*names, "classes/a/0.png", "lines.jsonl"):
        words = ["--data", str(every_data / name), "--out", str(every_data / f"made-{name}")]
        assert main(["data", *words, "--column", "other"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert str(every_data / name) in said
        options = known["data"] | (known["train"] if "python -m models train" in said else set())
        assert {*OPTION.findall(said)} <= options


def test_the_demo_says_whose_options_a_training_advises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: object) -> None:
        raise InputError("--policy budget:1kB: too little: lower --batch or --context")

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "measure", lambda *_: [])
    assert main(["demo", "--policy", "budget:1kB", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "error: --policy budget:1kB: too little: lower --batch or --context"
        " (options that the demo lacks are options of python -m models train)\n"
    )
