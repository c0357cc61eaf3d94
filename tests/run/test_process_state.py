"""What belongs to the process: its generators, its threads, and other people's optimisers."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from inchworm.run.checkpoint import as_arrays, from_arrays
from inchworm.run.saver import (
    cpu_capability,
    generators_state,
    restore_generators,
    thread_count,
)


def draw() -> list[float]:
    gauss = [random.gauss(0, 1), float(np.random.standard_normal())]  # noqa: NPY002 - both keep a second number for later
    return [*gauss, random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.randn(()))]  # noqa: NPY002


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_all_three_go_on_where_they_were(drawn_before: int) -> None:
    for _ in range(drawn_before):
        draw()
    state = json.loads(json.dumps(generators_state(), allow_nan=False))
    expect = [draw(), draw()]
    restore_generators(state)
    assert [draw(), draw()] == expect


def test_looking_moves_nothing() -> None:
    state = generators_state()
    assert generators_state() == state


def test_torch_is_not_imported_for_it() -> None:
    script = """
import sys
from inchworm.run.checkpoint import as_arrays
from inchworm.run.saver import cpu_capability, generators_state, restore_generators, thread_count
state = generators_state()
restore_generators(state | {"torch": "00"})  # of a process that had torch: nothing here could draw from it
assert "torch" not in state and cpu_capability() is None and thread_count(0) is None and thread_count(3) == 3
assert as_arrays({"a": [1, (2.5, None)]}) == {"keys": ["a"], "values": [[1, [2.5, None]]]}
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_threads_and_processor() -> None:
    assert thread_count(3) == 3
    assert thread_count(0) == torch.get_num_threads()
    assert cpu_capability() == torch.backends.cpu.get_cpu_capability()


def test_trees_of_tensors_come_back_with_their_kinds_and_keys() -> None:
    tensor = torch.arange(3.0)
    tree = {0: {"step": torch.tensor(2.0), "plain": 1.5}, "groups": [{"lr": 0.1, "params": [0, 1]}], "text": "x", "none": None, "t": tensor}
    plain = as_arrays(tree)
    tensor += 1  # what was taken is a copy
    back = from_arrays(plain)
    assert list(back) == [0, "groups", "text", "none", "t"]
    assert isinstance(back[0]["step"], torch.Tensor)
    assert (back[0]["step"].item(), back[0]["plain"]) == (2.0, 1.5)
    assert back["groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert back["t"].tolist() == [0.0, 1.0, 2.0]
