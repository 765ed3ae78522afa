"""The command lines: help, settings, one-line errors with code 2, shapes alone, and sampling."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.__main__ import main
from models.data.prepare import prepare
from models.errors import InputError
from models.nets.presets import TRAINED
from models.run.train import configured
from models.settings import from_toml, leaves, parse_toml, to_toml
from models.train.config import RunConfig
from models.train.kinds import every_setting, of_preset, read_config
from models.train.log import read_records
from tests.models.micro import FLAGS, TEXT, losses

COMMAND = [sys.executable, "-m", "models", "train", *FLAGS]


def train(*arguments: object) -> int:
    return main(["train", *FLAGS, *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    monkeypatch.chdir(tmp_path)
    return path


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "generate", "export", "demo"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(leaf.flag in shown for run in every_setting() for leaf in leaves(run))
    assert main(["--help"]) == 0
    assert main(["trian"]) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "missing"], "no such file or folder"),
        (["--data", "x" * 5000], "File name too long"),
        (["--data", ""], "--data is '', which is not a path"),
        (["--data", "empty"], "empty is empty: name files"),
        (["--data", "short"], "needs at least"),
        (["--data", "fifo"], "neither a file nor a folder"),
        (["--data", "[/red]"], "no such file or folder: [/red]"),
        (["--data", "huge"], "more than half of this machine's memory"),
        (["--data", "text=0"], "the weight must be a number above 0"),
        (["--data", "text", "--tokenizer", "bpe:x"], "has no valid vocabulary size"),
        (["--data", "text", "--tokenizer", "words"], "'words' is not a tokenizer"),
        (["--data", "text", "--tokenizer", "text"], "text is not a tokenizer of the package"),
        (
            ["--data", "text", "--tokenizer", "bpe:280", "--vocab", "256"],
            "tokens, but the model has 256: use --vocab",
        ),
        (["--tokenizer", "none.json"], "'none.json' is not a tokenizer"),
        (["--data", "text", "--out", "short"], "cannot write to short"),
        (["--data", "text", "--out", "new", "--resume"], "no run to resume in new"),
        (["--data", "text", "--preset", "tiny-llama", "--kv-heads", "3"], "does not divide"),
        (["--data", "text", "--kv-heads", "3"], "no setting of tiny: use a preset such as tiny-l"),
        (["--data", "text", "--kv-headz", "3"], "did you mean --kv-heads?"),
        (["--data", "text", "--preset", "tiney"], "did you mean tiny?"),
        (["--data", "text", "--batch", "0"], "--batch is 0, but must be at least 1"),
        (["--data", "text", "--batch", "x"], "invalid int value"),
        (["--data", "text", "--batch", "100000000"], "lower --batch or --context"),
        (["--data", "text", "--width", "2000000000"], "the state with one batch needs"),
        (["--data", "text", "--clip-norm", "0"], "--clip-norm is 0.0, but must be above 0"),
        (["--data", "text", "--learning-rate", "nan"], "--learning-rate is nan, but must be above"),
        (["--data", "text", "--seed", 2**64], "but must be at most 4294967295"),
        (["--data", "text", "--policy", "budget:3apples"], "not a number of bytes"),
        (["--data", "text", "--policy", "save_dotz"], "; did you mean 'save_dots'"),
        (["--data", "text", "--policy", "budget:1KiB"], "the lowest peak of a step"),
        (["--data", "text", "--policy", "plan:none.json"], "the file 'none.json' cannot be read"),
        (["--data", "text", "--policy", "plan:text"], "the file holds no plan"),
        (["--data", "text", "--config", "none.toml"], "cannot read none.toml"),
        (["--data", "text", "--config", "text"], "text is not valid TOML"),
        (["--data", "text", "--target", "tpu:v9", "--largest-batch"], "no such target"),
    ],
)  # fmt: skip
def test_unusable_input_is_one_line(
    text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    Path("empty").touch()
    Path("short").write_text("short")
    os.mkfifo("fifo")
    with Path("huge").open("wb") as file:
        file.truncate(2**42)
    assert train(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert complaint in said
    assert not (Path("runs/tiny/checkpoints")).exists() or not any(
        Path("runs/tiny/checkpoints").iterdir()
    )


def test_settings_come_from_the_preset_then_the_file_then_flags(text: Path) -> None:
    file = text.parent / "run.toml"
    file.write_text("batch = 3\n[optim]\nsteps = 2\nlearning_rate = 1\n[model]\ndepth = 1\n")
    given = ["--config", str(file), "--data", "text", "--batch", "2", "--out", "run"]
    assert main(["train", *FLAGS, *given]) == 0
    written = read_config(Path("run/config.toml").read_text(), "the file")
    assert (written.batch, written.optim.steps, written.optim.learning_rate) == (2, 2, 1.0)
    assert (written.model.depth, written.model.width) == (2, 32)  # the flag has it


def test_every_setting_is_written_and_read_again() -> None:
    for preset in TRAINED:
        run = of_preset(preset)
        assert read_config(to_toml(run), "text") == run
    run = from_toml(of_preset("tiny"), {"data": 'a "quoted"\x7f\n[/red] é'}, "text")
    assert read_config(to_toml(run), "text") == run


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("learning_rate = 1", "did you mean optim.learning_rate?"),
        ("[optim]\nlearning_rat = 1", "did you mean optim.learning_rate?"),
        ("[optmi]\nsteps = 1", "did you mean optim"),
        ("batch = 1.5", "must be an integer"),
        ("batch = true", "must be an integer"),
        ("[model]\nscan_layers = 1", "must be true or false"),
        ("optim = 3", "which is not a setting"),
        ("preset = 'big'", "there is no preset 'big'"),
        ("out = 3", "must be a path"),
        ("[model]\nwidth = 30", "is not a multiple of 4 heads"),
    ],
)
def test_unknown_or_invalid_settings_in_toml_raise(document: str, complaint: str) -> None:
    with pytest.raises(InputError) as raised:
        read_config(document, "run.toml")
    assert complaint in str(raised.value)
    assert parse_toml(document, "run.toml")


def test_names_of_settings_are_unique() -> None:
    for run in every_setting():
        names = [leaf.name for leaf in leaves(run)]
        assert len(names) == len({*names})
        assert isinstance(run, RunConfig)


@pytest.mark.parametrize(
    ("given", "vocab"),
    [
        ({}, 256),
        ({"tokenizer": "bytes"}, 256),
        ({"preset": "gpt2-124m"}, 50_257),
        ({"tokenizer": "bpe:300"}, 300),
        ({"preset": "gpt2-124m", "tokenizer": "bpe:300", "vocab_multiple": 128}, 384),
        ({"tokenizer": "bpe:300", "vocab": 1000, "vocab_multiple": 128}, 1000),
        ({"tokenizer": "bpe:300", "config": "said.toml"}, 2000),
        ({"tokenizer": "bpe:300", "config": "silent.toml"}, 300),
        ({"tokenizer": "tokens"}, 290),
        ({"tokenizer": "tokens/tokenizer.json"}, 290),
        ({"data": ["tokens"]}, 290),
        ({"data": ["bytes", "tokens=2"]}, 290),
        ({"data": ["bytes"]}, 256),
    ],
)
def test_a_vocabulary_is_the_tokenizers_where_none_is_given(
    text: Path, given: dict[str, Any], vocab: int
) -> None:
    Path("said.toml").write_text("[model]\nvocab = 2000\n")
    Path("silent.toml").write_text("[model]\nwidth = 64\n")
    prepare(text, Path("tokens"), tokenizer="bpe:290")
    prepare(text, Path("bytes"))
    assert configured({"config": None, **given}, resuming=False).model.vocab == vocab


def test_a_seven_billion_model_is_weighed_without_being_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--preset", "llama2-7b", "--batch", "1", "--context", "64", "--dry-run"]
    assert main(["train", *arguments]) == 0
    assert "6,738,415,616 parameters" in capsys.readouterr().out


@pytest.mark.slow
def test_the_largest_batch_is_found(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--largest-batch", "--capacity", "4MiB", "--context", "2") == 0
    said = capsys.readouterr().out
    assert "context 2: batch " in said
    assert "context 1: batch " in said
    assert "most tokens: --batch" in said
    assert not Path("runs").exists()


def test_no_room_for_one_window(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--largest-batch", "--capacity", "10KiB", "--context", "1") == 2
    assert "no room for one window" in capsys.readouterr().err


def test_train_resume_and_sample(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = text.parent / "run"
    arguments = ["--data", text, "--out", out, "--policy", "save_dots", "--dtype", "bfloat16"]
    arguments += ["--steps", 5]
    assert train(*arguments, "--max-seconds", 0) == 0
    plan = (out / "plan.json").read_text()
    assert "plan of a derivative in step, save_dots" in capsys.readouterr().out
    # The settings, and the plan, are those of the run.
    assert main(["train", "--out", str(out), "--resume", "--max-seconds", "inf"]) == 0
    assert (out / "plan.json").read_text() == plan
    assert [step for step, loss, _ in losses(out) if loss is not None] == [1, 2, 3, 4, 5]

    def draw(temperature: float) -> str:
        capsys.readouterr()
        flags = ["--run", str(out), "--length", "20", "--temperature", str(temperature)]
        assert main(["generate", *flags]) == 0
        return capsys.readouterr().out

    assert draw(0) == draw(0)
    assert draw(0).startswith("def ")
    assert draw(1.0) != draw(0)


def test_train_and_generate_by_words(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "text", "--tokenizer", "bpe:280", "--steps", 1, "--vocab-multiple", 128]
    assert train(*flags, "--out", "run") == 0
    assert read_config(Path("run/config.toml").read_text(), "run").model.vocab == 384
    capsys.readouterr()
    assert main(["generate", "--run", "run", "--length", "20", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_a_changed_setting_is_refused_or_overridden_and_recorded(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--data", text, "--out", "run", "--steps", 2) == 0
    again = ["train", "--out", "run", "--resume", "--steps", "3"]
    assert main(again) == 2
    assert (
        "steps was 2, not 3; leave them unchanged, or give --override steps"
        in capsys.readouterr().err
    )
    assert main([*again, "--override", "stepz"]) == 2
    assert "did you mean steps?" in capsys.readouterr().err
    assert main([*again, "--override", "steps"]) == 0
    assert {"step": 2, "override": {"steps": [2, 3]}} in read_records(Path("run/log.jsonl"))
    assert "steps = 3" in Path("run/config.toml").read_text()
    # What was edited in the file is a change like any other.
    config = Path("run/config.toml")
    config.write_text(config.read_text().replace("learning_rate = 0.003", "learning_rate = 0.004"))
    assert main(["train", "--out", "run", "--resume"]) == 2
    assert "learning_rate was 0.003, not 0.004" in capsys.readouterr().err


def test_generate_with_invalid_arguments_prints_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, complaint in (
        (["--run", str(tmp_path)], "no checkpoints in"),
        (["--prompt", ""], "--prompt needs at least one character"),
        (["--prompt", "\udcff"], "which is not UTF-8"),
        (["--temperature", "-1"], "must be at least 0"),
    ):
        assert main(["generate", *flags]) == 2
        said = capsys.readouterr().err
        assert complaint in said
        assert said.count("\n") == 1


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(text: Path) -> None:
    whole, killed = text.parent / "whole", text.parent / "killed"
    flags = ["--data", str(text), "--steps", "600", "--save-every", "20", "--validate-every", "100"]
    subprocess.run([*COMMAND, *flags, "--out", str(whole)], check=True, capture_output=True)
    process = subprocess.Popen([*COMMAND, *flags, "--out", str(killed)], stdout=subprocess.DEVNULL)
    while not (killed / "log.jsonl").exists() or len(losses(killed)) < 110:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(losses(killed)) < len(losses(whole))
    resume = [*COMMAND, "--out", str(killed), "--resume"]
    subprocess.run(resume, check=True, capture_output=True)
    assert losses(killed) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("background", ["--background-saves", "--no-background-saves"])
def test_a_disk_that_takes_no_more_is_one_line(text: Path, background: str) -> None:
    out = text.parent / "run"
    flags = ["--data", str(text), "--out", str(out), "--save-every", "5", background]
    subprocess.run([*COMMAND, *flags, "--steps", "10"], check=True, capture_output=True)
    before = out.parent / "before"
    shutil.copytree(out / "checkpoints", before)
    failed = subprocess.run(
        [*COMMAND, *flags, "--steps", "20", "--resume", "--override", "steps"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: saving to ")
    assert failed.stderr.endswith("step 10 is intact: File too large\n")
    assert failed.stderr.count("\n") == 1
    for file in before.rglob("*"):
        if file.is_file():
            assert (
                out / "checkpoints" / file.relative_to(before)
            ).read_bytes() == file.read_bytes()
    again = [*COMMAND, *flags, "--steps", "20", "--resume", "--override", "steps"]
    subprocess.run(again, check=True, capture_output=True)
