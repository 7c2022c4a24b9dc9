"""A transform is tried twice when a feed is built: it must give the same values both times."""

import grain
import numpy as np
import pytest

from feedline import Feed, Reading

_X = np.arange(64, dtype=np.float32).reshape(32, 2)


class _Objects:
    def __len__(self):
        return len(_X)

    def __getitem__(self, i):
        return {"x": _X[i]}


_KINDS = {
    "columns": lambda: {"x": _X},
    "objects": _Objects,
    "dataset": lambda: grain.MapDataset.source(_Objects()).seed(0).random_map(_noisy_record),
    "stream": lambda: grain.MapDataset.source(_Objects()).seed(0).random_map(_noisy_record).to_iter_dataset(),
}


def _noisy_record(record, rng):
    return {"x": record["x"] + rng.random(dtype=np.float32)}


def _keyed(batch, rows):
    noise = [np.random.default_rng(int(key)).random(2, np.float32) for key in rows.key]
    return {"x": batch["x"] + np.stack(noise), "index": rows.index}


def _global_noise(batch, rows):
    return {"x": batch["x"] + np.random.random(batch["x"].shape)}


@pytest.mark.parametrize("policy", ["raise", "substitute", "mask"])
@pytest.mark.parametrize("kind", _KINDS)
def test_a_transform_that_draws_from_np_random_is_refused(sharding, kind, policy):
    with pytest.raises(
        ValueError, match=r"batch\['x'\] of the first row came back with other values.*from rows\.key alone"
    ):
        Feed(_KINDS[kind](), 8, sharding, transform=_global_noise, reading=Reading(bad_rows=policy))


@pytest.mark.parametrize("kind", _KINDS)
def test_a_transform_that_draws_from_keys_is_accepted(sharding, kind):
    with Feed(_KINDS[kind](), 8, sharding, transform=_keyed) as feed:
        assert next(feed)["x"].shape == (8, 2)


def test_a_random_result_in_memory_that_is_used_again_is_refused(sharding):
    out, rng = np.empty((8, 2)), np.random.default_rng(0)

    def transform(batch, rows):
        return {"x": rng.random(out=out[: len(batch["x"])])}

    with pytest.raises(ValueError, match="came back with other values"):
        Feed({"x": _X}, 8, sharding, transform=transform)


def test_a_transform_may_work_in_place_and_give_nan(sharding):
    def transform(batch, rows):
        batch["x"] += 1
        return {"x": batch["x"], "nan": np.full(len(batch["x"]), np.nan)}

    with Feed({"x": _X}, 8, sharding, transform=transform) as feed:
        assert np.isnan(next(feed)["nan"]).all()
