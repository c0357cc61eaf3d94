"""Learning in several processes: two ranks of torchrun, each with half of the lanes, against one process with all of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coverage import Coverage

from doubles.ranks import CASES, run_case
from inchworm import load_policy
from inchworm.backends.torch.distributed import TorchRanks, tree_from_bytes, tree_to_bytes
from inchworm.core.errors import ConfigError
from inchworm.train.resolve import check_ranks

TESTS = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def train_and_die(directory: Path) -> tuple[list[int], str]:
    """Start two ranks without torchrun, which would end the other when one dies; return the exit codes and what rank 0 printed."""
    own = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-m", "doubles.ranks", "die", str(directory)]
    both = [subprocess.Popen(command, env={**own, "RANK": rank}, stderr=subprocess.PIPE, text=True) for rank in "01"]
    errors = [process.communicate(timeout=300)[1] for process in both]
    return [process.returncode for process in both], errors[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """The directory in which two ranks have trained all cases, what each noted, and what they printed."""
    directory = tmp_path_factory.mktemp("ranks")
    killed = train_and_die(directory)
    # Coverage reads this in every process that starts: these lines run in ranks alone.
    measured = {"COVERAGE_PROCESS_START": str(TESTS.parent / "pyproject.toml")} if Coverage.current() else {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [*torchrun, "--master-port", free_port(), "-m", "doubles.ranks", "record", str(directory)]
    done = subprocess.run(command, env=ENVIRONMENT | measured, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [{**json.loads((directory / f"found {rank}.json").read_text()), "killed": killed} for rank in (0, 1)]
    return directory, found, done.stdout + done.stderr


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_process_learns(ranks: tuple[Path, list[dict[str, Any]], str], name: str) -> None:
    directory, found, _ = ranks
    expected, metrics, _ = run_case(name)
    first, second = (np.load(directory / f"{name} {rank}.npz") for rank in (0, 1))
    assert set(first) == set(expected)
    for weight, values in expected.items():
        np.testing.assert_array_equal(first[weight], second[weight], err_msg=weight)  # the ranks agree to the bit
        np.testing.assert_allclose(first[weight], values, rtol=1e-5, atol=1e-5, err_msg=weight)
    both = found[0][name]["metrics"]
    assert set(both) == set(metrics)
    for metric in set(metrics) - {"ratio_error", "memory_spread"}:  # rounding alone; a mean of the parts' spreads
        assert both[metric] == pytest.approx(metrics[metric], rel=2e-3, abs=1e-5, nan_ok=True), metric


def test_lanes_are_split_and_counters_are_common(ranks: tuple[Path, list[dict[str, Any]], str]) -> None:
    first, second = (found["uneven lanes"] for found in ranks[1])
    assert (first["lanes"], second["lanes"]) == (2, 3)
    assert (first["is_main"], second["is_main"]) == (True, False)
    assert first["steps"] == second["steps"] == 5 * 12


def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(ranks: tuple[Path, list[dict[str, Any]], str]) -> None:
    assert [found["resumed"] for found in ranks[1]] == [True, True]


def test_a_bad_number_of_one_rank_stops_all(ranks: tuple[Path, list[dict[str, Any]], str]) -> None:
    for found in ranks[1]:
        assert "was not finite in 3 minibatches in a row" in found["bad_number"]


def test_the_command_trains_and_only_rank_0_writes(ranks: tuple[Path, list[dict[str, Any]], str]) -> None:
    directory, found, printed = ranks
    assert [each["exit_code"] for each in found] == [0, 0]
    run = directory / "runs" / "typed"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_steps"] for row in rows][:2] == [512, 1024]  # 8 copies x 64 steps in all
    assert load_policy(run / "policy.safetensors").policy_version == 2
    assert [each["refused"] for each in found] == [2, 2]
    assert "run.backend=numpy learns in one process, but WORLD_SIZE=2 processes were started" in printed


def test_a_rank_that_dies_stops_the_others_and_the_run_resumes(ranks: tuple[Path, list[dict[str, Any]], str]) -> None:
    codes, error = ranks[1][0]["killed"]
    assert codes == [1, 9], error
    assert "RankError: rank 0 of 2 stops, because another rank has ended" in error
    assert "the state after iteration 2 (120 steps) is saved" in error
    assert load_policy(ranks[0] / "killed" / "policy.safetensors").policy_version == 4


def test_own_columns_are_those_of_the_ranks_lanes() -> None:
    """Five lanes, two chunks each: column chunk * 5 + lane. Rank 1 has lanes 2 to 4, whose own numbers are chunk * 3 + lane - 2."""
    ranks = object.__new__(TorchRanks)
    ranks.rank, ranks.count, ranks.lanes = 1, 2, np.array([2, 3])
    columns, real = ranks.own_columns(np.array([[0, 7, 4], [1, 6, 6]]), np.array([[True, True, True], [True, True, False]]))
    assert columns.tolist() == [[3, 2], [0, 0]]  # 7 is (1, 2): 3; 4 is (0, 4): 2; the second minibatch has none of them
    assert real.tolist() == [[True, True], [False, False]]


def test_trees_travel_as_bytes() -> None:
    tree = {"a": np.arange(3), "b": [1, None, "x", np.float32(2.5)], "c": {"d": np.array(7, np.uint64)}, "e": float("inf")}
    found = tree_from_bytes(tree_to_bytes(tree))
    assert found["a"].tolist() == [0, 1, 2]
    assert found["c"]["d"].shape == ()
    assert (found["b"], found["e"]) == ([1, None, "x", 2.5], float("inf"))


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("ppo", {"compile": "on"}, "ppo.compile=on, because gradients are summed within a step"),
        ("env", {"num_envs": 1}, "env.num_envs=1; each needs at least one copy"),
        ("opponent", {"mode": "random"}, "opponent.mode=random, because opponents are not split"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, section: str, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    config = CASES["uneven lanes"][0]
    config = config.replace(**{section: getattr(config, section).replace(**changes)})
    with pytest.raises(ConfigError, match=f"WORLD_SIZE=2 processes cannot learn together with {message}"):
        check_ranks(config.env, config)
