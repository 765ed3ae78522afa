"""`experiments.unmodified.foreign`: its registry, and its measurements of a program of ours."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from experiments import report
from experiments.report import known
from experiments.unmodified.foreign import __main__ as run
from experiments.unmodified.foreign import picture, tables
from experiments.unmodified.foreign.measure import elsewhere, measured, ratio, whole
from experiments.unmodified.foreign.registry import COMMITS, PROGRAMS
from experiments.unmodified.sources import package

HERE = Path(run.__file__).parent


def found(share: float, time: float, size: int = 2**20) -> dict:
    seconds = {"default": [2 * time, 3 * time], "jax.grad": [2.0, 3.0]}
    return {"temp": {"default": int(share * size), "jax.grad": size}, "compile": seconds,
            "trace and lower": seconds, "time": (time, time, time), "loss difference": 0.0,
            "gradient difference": 1e-7}  # fmt: skip


def test_sixty_programs_of_more_than_twenty_repositories() -> None:
    repositories = {p.repository for p in PROGRAMS.values()} - {"none"}
    assert len(PROGRAMS) == 60
    assert len(repositories) > 20
    assert repositories <= set(COMMITS)
    assert all(re.fullmatch("[0-9a-f]{12}", commit) for commit in COMMITS.values())
    folders = [name.split("/")[1] for name in COMMITS]
    assert len(set(folders)) == len(folders)


def test_the_readme_lists_every_program() -> None:
    text = (HERE / "README.md").read_text()
    for name, program in PROGRAMS.items():
        assert f"| {name} | {program.repository} | {program.files} |" in text
    for name, commit in COMMITS.items():
        assert f"| {name} | {commit} |" in text


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.repository == "none"])
def test_reported_programs_need_no_checkout(name: str, tmp_path: Path) -> None:
    loss, args = PROGRAMS[name].make(tmp_path)
    assert jnp.isfinite(loss(*args))


def test_measured_returns_temp_bytes_compile_times_and_differences() -> None:
    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.sin(x @ w)) ** 2)

    got = measured(loss, (jnp.ones((64, 64)) / 64, jnp.ones((256, 64))))
    assert set(got["temp"]) == set(got["compile"]) == {"default", "jax.grad"}
    assert len(got["compile"]["default"]) == 3
    assert got["loss difference"] == 0
    assert got["gradient difference"] < 1e-6


def test_bytes_on_another_target() -> None:
    loss, args = lambda w: jnp.sum(jnp.tanh(w @ w) ** 2), (jnp.ones((64, 64)),)
    assert set(elsewhere(loss, args, "cpu")["temp"]) == {"default", "jax.grad"}


def test_ratios_are_medians_of_pairs() -> None:
    one = found(0.5, 1.5)
    assert ratio(one["compile"]) == whole(one) == 1.5


def test_bars_count_programs_and_take_medians() -> None:
    few = [found(0.5, 0.9), found(0.7, 0.9), found(1.5, 0.9)]
    bars = [tables.Bar("bytes", tables.share, 1.02, 3), tables.Bar("bytes", tables.share, 0.72)]
    rows = [bar.row(few) for bar in bars]
    assert rows[0] == ["bytes", "1.02", "3 of 60", "2 of 3", "no"]
    assert rows[1] == ["bytes", "0.72", "the median", "0.70", "yes"]


def test_tables_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = list(PROGRAMS)[:3]
    results = {first: {"cpu": found(0.5, 0.9), "gpu:h100": {"temp": found(0.6, 1)["temp"]}},
               second: {"cpu": {"failed": "ImportError"}},
               third: {"cpu": found(0.9, 1.2, size=100)}}  # fmt: skip
    marks = ("repositories", "programs", "bars", "measured")
    (tmp_path / "README.md").write_text("\n".join(f"<!-- {m} -->\n<!-- /{m} -->" for m in marks))
    assert list(tables.counted(results)) == [first]
    monkeypatch.setattr(report, "_WRITES", True)
    tables.write(tmp_path, results)
    text = (tmp_path / "README.md").read_text()
    assert (
        f"| {first} | 1.0 | 0.50 | 0.90 | 0.90 | 0.90 | 0.90 to 0.90 | 0e+00 | 1e-07 | 0.60 |"
        in text
    )
    assert "| gpu:h100 | temporary bytes | 1.02 | 56 of 60 | 1 of 1 | no |" in text
    assert f"| {second} | ImportError |" in text
    picture.draw(tmp_path / "ratios.png", results)
    assert (tmp_path / "ratios.png").stat().st_size > 0


def test_a_process_that_fails_leaves_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    error = f"Traceback\nModuleNotFoundError: none in {tmp_path}/flax\n"
    done = SimpleNamespace(returncode=1, stderr=error)
    monkeypatch.setattr(run.subprocess, "run", lambda *args, **options: done)
    run.separately("Flax lm1b", "cpu", tmp_path)
    kept = known(run.RESULTS)["Flax lm1b"]["cpu"]
    assert run.progress(kept) == "ModuleNotFoundError: none in FOLDER/flax"


def test_progress_and_results_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(run, "measured", lambda loss, args: found(0.5, 0.9))
    run.here("associative scan", "cpu", tmp_path)
    run.put("associative scan", "gpu:h100", {"temp": found(0.6, 1)["temp"]})
    kept = known(run.RESULTS)["associative scan"]
    assert run.progress(kept["cpu"]) == "1.0 MiB, bytes 0.50, compile 0.90, step 0.90"
    assert run.progress(kept["gpu:h100"]) == "1.0 MiB, bytes 0.60"


def test_submodule_loads_though_its_package_init_fails_to_import(tmp_path: Path) -> None:
    (tmp_path / "bare_package").mkdir()
    (tmp_path / "bare_package/__init__.py").write_text("import no_such_package")
    (tmp_path / "bare_package/part.py").write_text("x = 3")
    assert package(tmp_path, "bare_package.part", "bare_package").x == 3
