"""Streams: named, independent, equal everywhere, saved and restored to the bit."""

import json

import numpy as np
import pytest

from inchworm.core.seeding import derive_seed, episode_seed, make_stream, restore_stream, stream_state


def test_known_values_never_change():
    # A run of yesterday must be the same run tomorrow: SHA-256 of "0/episode/2/3" and so on, first 16 bytes, little-endian, 31 bits.
    assert derive_seed(0, "episode", 2, 3) == 2124623840
    assert episode_seed(7, 1, 4) == 1933674260
    assert make_stream(0, "sampling").integers(0, 2**32, 3).tolist() == [2933657506, 2356639638, 685283500]


@pytest.mark.parametrize("other", [(1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a"), (0, "a", 0, 0)])
def test_seed_purpose_and_counters_all_matter(other):
    assert derive_seed(0, "a", 0) != derive_seed(*other)
    assert make_stream(0, "a", 0).random() != make_stream(*other).random()


def test_seeds_fit_an_environment_and_copies_and_episodes_are_not_interchangeable():
    seeds = [episode_seed(5, copy, episode) for copy in range(20) for episode in range(50)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == 1000


def test_streams_are_saved_and_restored_to_the_bit():
    stream = make_stream(1, "sampling")
    stream.random(7)
    stream.integers(0, 2**32, dtype=np.uint32)  # leaves half of a 64-bit draw in the generator
    state = json.loads(json.dumps(stream_state(stream)))
    restored = restore_stream(state)
    assert restored.integers(0, 2**32, 3, dtype=np.uint32).tolist() == stream.integers(0, 2**32, 3, dtype=np.uint32).tolist()
    assert restored.standard_normal(100).tolist() == stream.standard_normal(100).tolist()
    assert stream_state(restored) == stream_state(stream)


def test_streams_of_another_kind_are_refused():
    state = stream_state(make_stream(0, "x")) | {"kind": "MT19937"}
    with pytest.raises(ValueError, match="MT19937"):
        restore_stream(state)
