"""Collectors on a Ray cluster of this machine: the bits of collectors in this process, lost actors, addresses without a cluster."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from doubles.collectors import assert_equal, iterations, local, policy
from doubles.crashing import Steered, World
from doubles.runs import finish, small_config
from inchworm.collect.host import CollectorEnvs
from inchworm.collect.ray_collector import AsyncRayCollector, RayCollector, RayEngine, _speaks_grpc, connect
from inchworm.config.sections import CollectConfig, EnvConfig
from inchworm.core.errors import ConfigError, MissingExtraError, WorkerError, WorkerRestartWarning
from inchworm.train.trainer import PPOTrainer

ray = pytest.importorskip("ray", reason="Ray is not installed; type: pip install 'inchworm[ray]'")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all tests, as it is started for a run; collectors of 0.25 CPUs do not wait for each other."""
    assert connect(None, 4.0), "it is ours"
    yield
    ray.shutdown()


NEEDS: dict[str, Any] = {"num_envs": 4, "cpus": 0.25}


def pid_of(collectors: Any, index: int) -> int:
    found = re.match(r"process (\d+) on ", collectors.processes[index])
    assert found is not None
    return int(found[1])


def test_the_cluster_of_a_run_listens_on_this_machine_alone() -> None:
    """/proc/net has addresses in hexadecimal: 0100007F is 127.0.0.1, also at the end of an IPv6 address."""
    assert ray.util.get_node_ip_address() == "127.0.0.1"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ, "restored"
    sockets = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ours = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]  # 0A is listening
    assert ours
    assert all(address.partition(":")[0].endswith("0100007F") for address in ours)


def test_another_process_joins_a_cluster_that_listens_on_this_machine_alone() -> None:
    """Ray itself would look for it at the machine's other address, for minutes."""
    gcs = ray.get_runtime_context().gcs_address
    assert gcs.startswith("127.0.0.1:")
    code = f"from inchworm.collect.ray_collector import connect, import_ray; print(connect({gcs!r}, 1.0), import_ray().cluster_resources())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("False "), done.stderr[-2000:]
    assert "'CPU': 4.0" in done.stdout


@pytest.mark.parametrize("count", [1, 2, 4])
def test_actors_give_the_bits_of_collectors_in_this_process(count: int) -> None:
    """Dicts, masks and hybrid actions; the actors have imported neither torch nor jax, and say that they act with weights k."""
    env = partial(World)
    acting, other = policy(env), policy(env)
    with RayCollector(env, other, num_collectors=count, **NEEDS) as collectors:
        found = iterations(collectors, other, 3)
        links = [seat.link for seat in collectors._seats]
        imported = {name.split(".")[0] for link in links for name in ray.get(link.actor.imported.remote())}
    assert_equal(found, iterations(local(env, acting, num_collectors=count), acting, 3))
    assert [rollout.policy_version.tolist() for rollout in found] == [[number] * 4 for number in range(3)]
    assert imported.isdisjoint({"torch", "jax"})
    assert "numpy" in imported


def test_lost_actors_collect_the_same_rollouts_again_while_learn_runs() -> None:
    """Collecting ahead by one rollout; the one actor is lost before rollout 1 is awaited, the other before rollout 3."""
    acting, other = policy(World), policy(World)
    expected = iterations(local(World, acting, num_collectors=2, staleness=1), acting, 5)
    with AsyncRayCollector(World, other, num_collectors=2, **NEEDS) as collectors, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = iterations(collectors, other, 1)
        os.kill(pid_of(collectors, 0), signal.SIGKILL)
        found += iterations(collectors, other, 2)
        os.kill(pid_of(collectors, 1), signal.SIGKILL)
        found += iterations(collectors, other, 2)
    assert_equal(found, expected)
    texts = [str(one.message) for one in caught if one.category is WorkerRestartWarning]
    assert [text.partition(" in process")[0] for text in texts] == ["collector 0 (lanes 0 to 1)", "collector 1 (lanes 2 to 3)"]
    assert "was lost (ActorDiedError" in texts[0]


def test_states_that_are_large_beside_rollouts_travel_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of 2 steps are smaller than the state: it is asked for when it is needed, and a lost actor repeats some rollouts."""
    acting, other = policy(World), policy(World)
    expected = iterations(local(World, acting, num_collectors=1), acting, 6, steps=2)
    with RayCollector(World, other, **NEEDS) as collectors:
        found = iterations(collectors, other, 4, steps=2)
        assert sorted(collectors._seats[0].states) == [0], "none has travelled"
        os.kill(pid_of(collectors, 0), signal.SIGKILL)
        with pytest.warns(WorkerRestartWarning, match="repeats 5 rollouts"):
            found += iterations(collectors, other, 1, steps=2)
        state = collectors.state_dict()
        found += iterations(collectors, other, 1, steps=2)
    assert_equal(found, expected)
    again = local(World, policy(World), num_collectors=1)
    again.load_state_dict(state)
    assert again.env_steps == 5 * 2 * 4


def test_a_run_on_ray_is_the_run_on_local_collectors() -> None:
    def run(engine: Any) -> dict[str, Any]:
        config = small_config(iterations=4, backend="numpy").replace(collect=CollectConfig(engine=engine, num_collectors=2, ray_cpus=0.25))
        return finish(PPOTrainer("mlp", "CartPole-v1", config))

    assert run("ray") == run("local")


def test_errors_of_the_environment_name_the_collector(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.write_text("raise")
    with (
        RayCollector(partial(Steered, said), policy(World), **NEEDS) as collectors,
        pytest.raises(WorkerError, match=r"collector 0 \(lanes 0 to 3\): .*ValueError: no more fuel"),
    ):
        collectors.collect(1)


def test_more_than_the_cluster_has_is_reported_and_not_waited_for_forever() -> None:
    envs = CollectorEnvs.of("CartPole-v1", 2)
    with (
        pytest.warns(UserWarning, match=r"2 collectors need 100 CPU \(it has 4\) of the Ray cluster"),
        RayCollector(envs, policy(), num_collectors=2, cpus=50, timeout=0.6) as collectors,
        pytest.raises(WorkerError, match=r"no place for collector 0 \(lane 0\), which needs CPU 50; .* lower collect.ray_cpus"),
    ):
        collectors.collect(1)


def test_an_address_without_a_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, or a server of another kind, for which Ray itself would wait for minutes; and the cluster that there is."""
    gcs = ray.get_runtime_context().gcs_address
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(ConfigError, match=rf"there is no Ray cluster at {nobody}: .*refused; start one with `ray start --head`"):
            RayEngine(1, address=nobody)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), daemon=True).start()
        with pytest.raises(ConfigError, match=rf"there is no Ray cluster at 127.0.0.1:{port}, but something else; start one"):
            RayEngine(1, address=f"127.0.0.1:{port}")
    host, port = gcs.split(":")
    with socket.create_connection((host, int(port))) as connection:
        assert _speaks_grpc(connection)
    for wrong in ("somewhere", "127.0.0.1:port"):
        with pytest.raises(ConfigError, match=f"collect.ray_address='{wrong}' is not host:port or auto"):
            RayEngine(1, address=wrong)


def test_without_ray_the_message_is_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = small_config(backend="numpy").replace(collect=CollectConfig(engine="ray"), env=EnvConfig(num_envs=2))
    with pytest.raises(MissingExtraError, match=r'pip install "inchworm\[ray\]"'):
        PPOTrainer("mlp", "CartPole-v1", config)
