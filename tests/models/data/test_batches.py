"""The order of batches: a function of the seed, of no process count, and taken up where it was."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.data.batches import Share, batches, mixed, share_of, spread
from models.errors import InputError


class Numbers:
    """Elements from `start`, each a tree of two arrays."""

    def __init__(self, count: int, start: int = 0) -> None:
        self._count, self._start = count, start

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        assert 0 <= index < self._count
        number = self._start + index
        return {"x": np.array([number, -number]), "y": np.array(number)}


A, B = Numbers(30), Numbers(7, 1000)


def taken(count: int, *, seed: int = 0, weights: Any = (0.7, 0.3), **options: Any) -> list[Any]:
    options = {"batch": 4, **options}
    iterator = batches(mixed((A, B), weights, seed), **options)
    return [next(iterator) for _ in range(count)]


def numbers(some: list[Any]) -> np.ndarray:
    return np.stack([tree["y"] for tree in some])


def test_batches_have_slices_and_all_leaves() -> None:
    (one,) = taken(1, slices=3)
    assert one["x"].shape == (3, 4, 2)
    np.testing.assert_array_equal(one["x"], np.stack([one["y"], -one["y"]], axis=-1))
    np.testing.assert_array_equal(one["y"], numbers(taken(3))[:, 0])


def test_order_is_a_function_of_the_seed() -> None:
    first = numbers(taken(50))
    np.testing.assert_array_equal(first, numbers(taken(50)))
    assert not np.array_equal(first, numbers(taken(50, seed=1)))


@pytest.mark.parametrize("weights", [(0.7, 0.3), (7, 3), (0.999, 0.001), (0.5, 0.5)])
def test_sources_have_their_share_and_each_is_used_up(weights: tuple[float, float]) -> None:
    flat = numbers(taken(250, weights=weights)).ravel()
    share = weights[0] / sum(weights)
    assert abs(np.mean(flat < 1000) - share) < 0.005
    for source, span in ((A, flat[flat < 1000]), (B, flat[flat >= 1000])):
        epochs = span[: len(span) // len(source) * len(source)].reshape(-1, len(source))
        for epoch in epochs:
            assert len(set(epoch)) == len(source)
        assert len({tuple(epoch) for epoch in epochs}) >= 0.9 * len(epochs)


def test_sources_of_one_size_are_shuffled_apart() -> None:
    iterator = batches(mixed((Numbers(50), Numbers(50, 1000)), (1, 1), 0), batch=100)
    flat = next(iterator)["y"].ravel()
    assert not np.array_equal(flat[flat < 1000], flat[flat >= 1000] - 1000)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("slices", [1, 3])
def test_processes_read_parts_of_the_same_batches(processes: int, slices: int) -> None:
    whole = numbers(taken(20, slices=slices))
    parts = [
        numbers(taken(20, slices=slices, share=Share(process, processes)))
        for process in range(processes)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), whole)


def test_iterator_state_resumes_mid_epoch_for_any_process_count() -> None:
    whole = numbers(taken(40))
    iterator = batches(mixed((A, B), (0.7, 0.3), 0), batch=4)
    for _ in range(13):
        next(iterator)
    state = iterator.get_state()
    assert state == {"next_index": 13}
    for share in (Share(), Share(1, 2)):
        resumed = batches(mixed((A, B), (0.7, 0.3), 0), batch=4, share=share)
        resumed.set_state(state)
        expected = whole[13:40, 0, share.process * 2 :]
        np.testing.assert_array_equal(numbers([next(resumed) for _ in range(27)])[:, 0], expected)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])


def test_batches_on_devices_are_ready_and_resume() -> None:
    sharding = NamedSharding(mesh(), P(None, "data"))
    whole = numbers(taken(30))
    iterator = batches(mixed((A, B), (0.7, 0.3), 0), batch=4, sharding=sharding)
    some = [next(iterator) for _ in range(9)]
    assert all(x.sharding == sharding for x in jax.tree.leaves(some))
    np.testing.assert_array_equal(numbers(some), whole[:9])
    state = iterator.get_state()
    assert "9" in str(state)
    resumed = batches(mixed((A, B), (0.7, 0.3), 0), batch=4, sharding=sharding)
    resumed.set_state(state)
    np.testing.assert_array_equal(numbers([next(resumed) for _ in range(21)]), whole[9:])


def test_share_of_a_process_matches_the_batch_slices_of_its_devices() -> None:
    assert share_of(NamedSharding(mesh(), P(None, "data")), 8) == Share(0, 1)
    assert share_of(NamedSharding(mesh(), P()), 8) == Share(0, 1)
    assert share_of(NamedSharding(mesh(), P(None, None, "data")), 3) == Share(0, 1)

    class Elsewhere:
        """The sharding of a process whose devices have these parts."""

        def __init__(self, *parts: slice) -> None:
            self._parts = parts

        def addressable_devices_indices_map(self, _: Any) -> dict[int, Any]:
            return {i: (slice(None), part) for i, part in enumerate(self._parts)}

    def found(*parts: slice) -> Share:
        sharding: Any = Elsewhere(*parts)
        return share_of(sharding, 8)

    assert found(slice(4, 6), slice(6, 8)) == Share(1, 2)
    assert found(slice(4, 6), slice(4, 6)) == Share(2, 4)
    with pytest.raises(InputError, match="hold parts of a batch that are not contiguous"):
        found(slice(0, 2), slice(4, 6))


def test_batches_not_divisible_by_processes_or_devices_raise() -> None:
    with pytest.raises(
        InputError, match="batches of 4 cannot be divided equally among 3 processes"
    ):
        taken(1, share=Share(0, 3))
    with pytest.raises(InputError, match="batches of 6 cannot be sharded over these devices"):
        share_of(NamedSharding(mesh(), P(None, "data")), 6)


def test_a_spread_has_one_shape_and_both_ends() -> None:
    some = spread(A, batch=8, count=20)
    assert [tree["x"].shape for tree in some] == [(8, 2), (8, 2)]
    assert some[0]["y"][0] == 0
    assert spread(A, batch=10, count=20)[-1]["y"][-1] == 29
    assert [tree["y"].shape for tree in spread(B, batch=16, count=64)] == [(7,)]
