"""Every form in which PPOTrainer takes its arguments."""

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from doubles.runs import BATCH, LANES, STEPS, small_config
from doubles.toys import Corridor, Counter, watched
from examples.custom_network import OwnPolicy
from inchworm import check_env
from inchworm.backends.numpy.policy import NumpyPolicy
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.cli.main import main
from inchworm.collect.opponents import RandomActor
from inchworm.config.sections import EnvConfig, EvalConfig, PolicyConfig, PPOConfig, RunConfig, TrainingConfig
from inchworm.core.errors import ConfigError, EnvError, InchwormError, SpaceError
from inchworm.core.types import Weights
from inchworm.env.source import WorkerChoice, make_vector_env
from inchworm.policy.composite import PolicyMap
from inchworm.policy.spec import PolicySpec
from inchworm.run.directory import keep_choices
from inchworm.run.policies import load_policy
from inchworm.train import resolve as choices
from inchworm.train.resolve import COMPILE_SECONDS, SECONDS_PER_SAMPLE, SECONDS_PER_STEP, choose_compile, resolve_choices
from inchworm.train.trainer import PPOTrainer, create_training_components

CARTPOLE = gym.make("CartPole-v1")
SPEC = PolicySpec(CARTPOLE.observation_space, CARTPOLE.action_space, PolicyConfig(hidden_sizes=(8,), activation="relu"))


def make_cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


ENVS: dict[str, tuple[Any, int, str]] = {
    "id": ("CartPole-v1", 8, "CartPole-v1"),
    "EnvConfig": (EnvConfig(id="CartPole-v1", num_envs=3), 3, "CartPole-v1"),
    "environment": (make_cartpole, 1, "CartPole-v1"),  # made anew in the test
    "factory": (make_cartpole, 8, f"{__name__}:make_cartpole"),
    "nameless factory": (functools.partial(gym.make, "CartPole-v1"), 8, "partial"),
    "VectorEnv": (lambda: make_vector_env("CartPole-v1", 2), 2, "NativeCartPole"),
}


@pytest.mark.parametrize("kind", ENVS)
def test_two_arguments_are_enough(kind: str) -> None:
    env, lanes, name = ENVS[kind]
    env = env() if kind in ("environment", "VectorEnv") else env
    with PPOTrainer("mlp", env) as trainer:
        assert trainer.collect_rollouts(4).num_lanes == trainer.env.num_lanes == trainer.config.env.num_envs == lanes
        assert trainer.config.env.id == name  # the run's record names the world that was trained in
        assert trainer.learn(trainer.collect_rollouts(4))["loss"] != 0.0
        assert trainer.config.ppo == PPOConfig()
    if kind == "VectorEnv":
        assert trainer.env is env


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("mlp", PolicyConfig()),
        (PolicyConfig(hidden_sizes=(4,)), PolicyConfig(hidden_sizes=(4,))),
        (SPEC, SPEC.config),
        (TorchPolicy(SPEC, seed=5), SPEC.config),
        (NumpyPolicy(SPEC, seed=5), SPEC.config),
    ],
    ids=["name", "PolicyConfig", "PolicySpec", "TorchPolicy", "NumpyPolicy"],
)
def test_every_form_of_a_policy_collects_and_learns(policy: Any, config: PolicyConfig) -> None:
    with PPOTrainer(policy, "CartPole-v1", num_envs=2, seed=1) as trainer:
        if isinstance(policy, TorchPolicy | NumpyPolicy):
            assert trainer.policy is policy
        assert trainer.config.policy == config  # the run's record names the network that was trained
        before = trainer.policy.get_weights()
        trainer.learn(trainer.collect_rollouts(8))
        after, acting = trainer.policy.get_weights(), trainer.collector.policy.get_weights()
        assert any(not np.array_equal(before[name], value) for name, value in after.items())
        assert all(np.array_equal(acting[name], value) for name, value in after.items())


def test_a_policy_in_numpy_is_trained_by_torch_as_a_copy_if_that_is_asked_for() -> None:
    policy = NumpyPolicy(SPEC, seed=5)
    with PPOTrainer(policy, "CartPole-v1", num_envs=2, seed=1, backend="torch") as trainer:
        assert isinstance(trainer.policy, TorchPolicy)
        assert all(np.array_equal(value, policy.get_weights()[name]) for name, value in trainer.policy.get_weights().items())


def test_the_seed_decides_weights_worlds_and_samples() -> None:
    def first(seed: int) -> list[bytes]:
        with PPOTrainer("mlp", "CartPole-v1", num_envs=2, seed=seed) as trainer:
            rollout = trainer.collect_rollouts(20)
            return [
                trainer.policy.get_weights()["actor.0.weight"].tobytes(),
                rollout.observations[0].tobytes(),
                rollout.actions.tobytes(),
                np.array([trainer.learn(rollout)["loss"]]).tobytes(),
            ]

    assert first(1) == first(1)
    assert all(one != other for one, other in zip(first(1), first(2), strict=True))


def test_cnn_by_name() -> None:
    class Image(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)

        def _observe(self) -> np.ndarray:
            return np.zeros((1, 36, 36), np.uint8)

    with PPOTrainer("cnn", Image, num_envs=1) as trainer:
        assert trainer.config.policy.kind == "cnn"
        assert trainer.collector.policy is trainer.policy  # convolutions act where they learn
        assert trainer.collect_rollouts(2).observations.dtype == np.uint8


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_memory_by_name(kind: str, tmp_path: Path) -> None:
    with PPOTrainer(kind, "CartPole-v1", PPOConfig(rollout_steps=40, num_minibatches=2), num_envs=2, seed=1) as trainer:
        rollout = trainer.collect_rollouts()
        assert rollout.policy_state["hidden"].shape == (2, 2, 1, 64)  # at rows 0 and 32: never every row, never none
        assert trainer.learn(rollout)["ratio_error"] < 5e-5
        assert isinstance(trainer.collector.policy, NumpyPolicy)  # NumPy acts, torch learns
        assert trainer.evaluate(episodes=2).mean_return > 0
        path = trainer.save_policy(tmp_path / "policy.safetensors")
        assert load_policy(path).spec.config.kind == kind


@pytest.mark.parametrize(("length", "recorded"), [(5, 3), (1, 14), ("auto", 1)])  # 14 = 5 + 5 + 4; auto is never 1
def test_memory_is_recorded_where_sequences_begin(length: Any, recorded: int) -> None:
    config = small_config(policy=PolicyConfig(kind="gru", memory_size=6), ppo=PPOConfig(rollout_steps=14, sequence_length=length))
    with PPOTrainer("gru", "CartPole-v1", config) as trainer:
        assert len(trainer.collect_rollouts().policy_state["hidden"]) == recorded
    components = create_training_components(config, "gru")
    assert len(components.collector.collect(14).policy_state["hidden"]) == recorded
    components.collector.close()


def test_an_actor_that_is_not_a_policy_can_collect_but_not_learn() -> None:
    with PPOTrainer(RandomActor(CARTPOLE.action_space), "CartPole-v1", num_envs=2) as trainer:
        rollout = trainer.collect_rollouts(5)
        assert rollout.num_valid == 10
        with pytest.raises(ConfigError, match="RandomActor"):
            trainer.learn(rollout)


# ---- config and keywords
@pytest.mark.parametrize("wrong", [{"gamma": 0.9}, 3, "ppo", EnvConfig()])
def test_a_config_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"PPOConfig or a TrainingConfig, not {type(wrong).__name__}"):
        PPOTrainer("mlp", "CartPole-v1", wrong)


def test_keywords_win_over_the_config() -> None:
    config = TrainingConfig(env=EnvConfig(id="Acrobot-v1", num_envs=5), run=RunConfig(seed=3, device="auto"), ppo=PPOConfig(gamma=0.5))
    with PPOTrainer("mlp", "CartPole-v1", config, num_envs=2, seed=9, backend="torch", device="cpu") as trainer:
        used = trainer.config
    assert (used.env.id, used.env.num_envs, used.run.seed, used.run.device, used.ppo.gamma) == ("CartPole-v1", 2, 9, "cpu", 0.5)
    with PPOTrainer("mlp", "CartPole-v1", config) as trainer:
        assert (trainer.config.run.seed, trainer.config.env.num_envs) == (3, 5)


def test_a_device_may_be_torchs_own() -> None:
    import torch

    with PPOTrainer("mlp", "CartPole-v1", num_envs=1, device=torch.device("cpu")) as trainer:  # type: ignore[arg-type]
        assert trainer.device == trainer.config.run.device == "cpu"


@pytest.mark.parametrize("keywords", [{"backend": "abacus"}, {"seed": -1}, {"seed": 1.5}, {"num_envs": 0}])
def test_impossible_keywords_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keywords))):
        PPOTrainer("mlp", "CartPole-v1", **keywords)


def test_a_ppo_config_is_checked_against_the_lanes_that_are_asked_for() -> None:
    # 8 lanes x 32 steps = 256 would be too few, 16 x 32 = 512 is not
    wide = PPOConfig(rollout_steps=32, minibatch_size=512)
    PPOTrainer("mlp", "CartPole-v1", wide, num_envs=16).close()
    with pytest.raises(ConfigError, match=r"4 lanes x 32 steps = 128"):
        PPOTrainer("mlp", "CartPole-v1", wide, num_envs=4)


def test_what_was_handed_over_has_the_lanes_it_has() -> None:
    with pytest.raises(ConfigError, match=r"num_envs=4, but the .* has 1 lane"):
        PPOTrainer("mlp", make_cartpole(), num_envs=4)
    with pytest.raises(ConfigError, match=r"num_envs=4, but the NativeCartPole has 2 lane"):
        PPOTrainer("mlp", make_vector_env("CartPole-v1", 2), num_envs=4)
    PPOTrainer("mlp", make_cartpole(), num_envs=1).close()


def test_no_more_workers_than_lanes() -> None:
    config = TrainingConfig(env=EnvConfig(num_envs=8, num_workers=4))
    env = make_vector_env("CartPole-v1", 2)
    with PPOTrainer("mlp", env, config) as trainer:
        assert (trainer.config.env.num_envs, trainer.config.env.num_workers) == (2, 2)


def test_without_a_training_config_no_score_is_taken_while_training() -> None:
    for config in (None, PPOConfig()):
        with PPOTrainer("mlp", "CartPole-v1", config, num_envs=1) as trainer:
            assert (trainer.config.evaluation.interval, trainer.config.evaluation.final_episodes) == (0, 0)
    with PPOTrainer("mlp", "CartPole-v1", TrainingConfig(), num_envs=1) as trainer:
        assert trainer.config.evaluation == EvalConfig()


# ---- wrong use
@pytest.mark.parametrize("policy", ["mpl", object(), None, 3])
def test_what_is_not_a_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy"):
        PPOTrainer(policy, "CartPole-v1", num_envs=1)


def test_environments_that_were_made_are_closed_if_the_policy_cannot_be() -> None:
    door, open_doors = watched(Counter)
    with pytest.raises(InchwormError):
        PPOTrainer(object(), door, num_envs=3)  # type: ignore[arg-type]
    assert not open_doors
    env = make_vector_env(door, 2)
    with pytest.raises(InchwormError):
        PPOTrainer(object(), env)  # type: ignore[arg-type]
    assert len(open_doors) == 2  # an environment that was passed in stays open
    env.close()


def test_a_policy_of_other_spaces_is_refused_before_it_acts() -> None:
    with pytest.raises(SpaceError, match="observation"):
        PPOTrainer(SPEC, Corridor, num_envs=1)
    with pytest.raises(SpaceError, match="observation"):
        PPOTrainer(NumpyPolicy(SPEC), Corridor, num_envs=1)
    with pytest.raises(SpaceError, match="action"):
        PPOTrainer(SPEC, _cartpole_with_three_actions, num_envs=1)


def _cartpole_with_three_actions() -> gym.Env[Any, Any]:
    env = gym.make("CartPole-v1")
    env.action_space = spaces.Discrete(3)
    return env


@pytest.mark.parametrize("given", ["factory", "instance"])
def test_the_env_config_is_put_around_what_was_given(given: str) -> None:
    env = CartPoleEnv if given == "factory" else CartPoleEnv()  # without a limit of its own
    config = TrainingConfig(env=EnvConfig(max_episode_steps=3, frame_stack=2), ppo=PPOConfig(rollout_steps=8))
    with PPOTrainer("mlp", env, config, num_envs=2 if given == "factory" else None) as trainer:
        rollout = trainer.collect_rollouts(7)
        assert rollout.observations.shape[2:] == (2, 4)
        assert rollout.truncated[:, 0].tolist() == [False, False, True] * 2 + [False]


def test_arguments_cannot_reach_an_environment_that_is_made() -> None:
    with pytest.raises(EnvError, match=r"env.kwargs=\{'size': 3\} cannot reach an environment that is made already"):
        PPOTrainer("mlp", CartPoleEnv(), TrainingConfig(env=EnvConfig(kwargs={"size": 3}), ppo=PPOConfig(rollout_steps=8)))
    with pytest.raises(ConfigError, match=r"env\.num_workers=2, but an environment instance stays in this process"):
        PPOTrainer("mlp", CartPoleEnv(), TrainingConfig(env=EnvConfig(num_envs=2, num_workers=2), ppo=PPOConfig(rollout_steps=8)))


# ---- choices
OPEN = {"env": {"num_workers": "auto", "num_envs": 4}, "ppo": {"compile": "auto"}}


def test_nothing_is_left_open_and_each_choice_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "choose_num_workers", lambda _: WorkerChoice(3, "3 workers: because", help_workers=True))

    def choose(config: TrainingConfig, policy: Any = "mlp") -> tuple[TrainingConfig, list[str]]:
        return resolve_choices(policy, config.env, config)

    config, reasons = choose(TrainingConfig.from_dict(OPEN))
    assert (config.env.num_workers, config.env.help_workers) == (3, True)
    assert (config.run.backend, config.ppo.compile) == ("numpy", "off")
    assert reasons[0].startswith("run.backend=numpy, because ")
    assert reasons[1] == "3 workers: because"
    assert reasons[2].startswith("ppo.compile=off, because ")
    assert choose(config) == (config, [])
    long = TrainingConfig.from_dict(OPEN | {"run": {"total_timesteps": 100_000_000, "backend": "torch"}})
    assert choose(long)[0].ppo.compile == "on"
    assert choose(long, RandomActor(CARTPOLE.action_space))[0].ppo.compile == "off"


TORCH = PolicyConfig(kind="lstm"), PolicyConfig(kind="cnn"), PolicyConfig(central_critic=True), PolicyConfig(hidden_sizes=(8, 1024))


@pytest.mark.parametrize(
    ("policy", "config", "losses", "backend"),
    [
        ("mlp", {}, False, "numpy"),
        (PolicyConfig(hidden_sizes=(512, 512)), {"run": {"device": "cpu"}}, False, "numpy"),
        (NumpyPolicy(SPEC), {}, False, "numpy"),
        (RandomActor(CARTPOLE.action_space), {}, False, "numpy"),
        (PolicyMap(policies={"a": "mlp", "b": "mlp"}, lane_map=["a", "b"]), {}, False, "numpy"),
        *((network, {}, False, "torch") for network in TORCH),
        (PolicyMap(policies={"a": "mlp", "b": PolicyConfig(kind="gru")}, lane_map=["a", "b"]), {}, False, "torch"),
        (TorchPolicy(SPEC), {}, False, "torch"),
        ("mlp", {}, True, "torch"),
        ("mlp", {"ppo": {"compile": "on"}}, False, "torch"),
        ("mlp", {"ppo": {"optimizer": "muon"}}, False, "torch"),
        ("mlp", {"ppo": {"optimizer": "rmsprop"}}, False, "numpy"),
        (PolicyMap(policies={"a": "mlp", "b": "mlp"}, lane_map=["a", "b"], ppo={"b": {"optimizer": "muon"}}), {}, False, "torch"),
        ("mlp", {"run": {"device": "cuda"}}, False, "torch"),
        ("lstm", {"run": {"backend": "torch"}}, False, "torch"),
    ],
)
def test_the_backend_is_chosen_by_the_config_and_the_policy(policy: Any, config: dict[str, Any], losses: bool, backend: str) -> None:
    chosen, reasons = resolve_choices(policy, Corridor, TrainingConfig.from_dict(config), losses=losses)
    assert chosen.run.backend == backend
    assert [reason.startswith(f"run.backend={backend}, because ") for reason in reasons] == [True] * (
        "backend" not in config.get("run", {})
    )


def test_a_continued_run_keeps_its_choices() -> None:
    before = TrainingConfig.from_dict(
        {"env": {"num_workers": 2, "help_workers": True}, "ppo": {"compile": "on"}, "run": {"backend": "torch"}}
    )
    now = TrainingConfig.from_dict(OPEN | {"run": {"total_timesteps": 7}})
    kept = keep_choices(before, now)
    assert kept.env.help_workers
    assert (kept.env.num_workers, kept.ppo.compile, kept.run.total_timesteps, kept.env.num_envs) == (2, "on", 7, 4)
    assert kept.run.backend == "torch"
    fixed = TrainingConfig.from_dict({"env": {"num_workers": 1}, "ppo": {"compile": "off"}, "run": {"backend": "numpy"}})
    assert keep_choices(before, fixed) == fixed


def test_a_trainer_settles_and_a_resumed_one_does_as_the_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = PPOConfig(rollout_steps=STEPS, num_minibatches=1, update_epochs=1, compile="auto")
    config = small_config(iterations=2, ppo=ppo).replace(env=EnvConfig(num_envs=LANES, num_workers="auto"))
    with PPOTrainer("mlp", "CartPole-v1", config, run_dir=tmp_path) as trainer:
        assert (trainer.config.env.num_workers, trainer.config.ppo.compile) == (0, "off")
        assert len(trainer.choices) == 2
        trainer.train()
    longer = config.replace(run=config.run.replace(total_timesteps=10**9))  # which by itself would be compiled
    with PPOTrainer("mlp", "CartPole-v1", longer, run_dir=tmp_path) as trainer:
        assert trainer.config.ppo.compile == "on"
        trainer.load_checkpoint()
        assert trainer.config.ppo.compile == "off"
        trainer.train(4 * BATCH)
        assert trainer.total_timesteps == 4 * BATCH


def test_a_run_prints_and_records_its_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--compile", "auto", "--backend", "numpy", "--total-timesteps", "256", "--run.name", "x", "--profile"]
    assert main(["train", "CartPole-v1", *flags]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:4] == [
        "training CartPole-v1 for 256 steps, seed 0, run runs/x",
        "no worker processes: all 8 copies of CartPole-v1 are stepped together",
        "ppo.compile=off, because run.backend=numpy has nothing to compile",
        "rollout: 8 envs x 64 steps (18.6 kB), backend: numpy",
    ]
    assert "where the time went" in out
    assert main(["train", "CartPole-v1", *flags]) == 0  # auto again, on a run that exists: it keeps what it chose
    saved = TrainingConfig.from_yaml(tmp_path / "runs" / "x" / "config.yaml")
    assert (saved.env.num_workers, saved.ppo.compile) == (0, "off")


# ---- compile choice
def config_of(total: int = 1_000_000, *, policy: PolicyConfig | None = None, run: dict | None = None, **ppo) -> TrainingConfig:
    return TrainingConfig(
        env=EnvConfig(num_envs=4),
        policy=policy or PolicyConfig(),
        ppo=PPOConfig(**{"rollout_steps": 250, "minibatch_size": 100, "update_epochs": 3, **ppo}),
        run=RunConfig(**{"total_timesteps": total, "backend": "torch", **(run or {})}),
    )


@pytest.mark.parametrize(
    ("config", "planned"),
    [  # 4 lanes x 250 steps = 1000 a rollout, 10 minibatches of 100, 3 epochs: 30 steps an iteration
        (config_of(5_000), "150 minibatch steps of 100 samples"),
        (config_of(5_001), "180 minibatch steps of 100 samples"),  # a run ends with whole iterations
        (config_of(5_000, run={"max_iterations": 2}), "60 minibatch steps of 100 samples"),
        (config_of(5_000, minibatch_size=None, num_minibatches=8), "120 minibatch steps of 125 samples"),
    ],
)
def test_planned_steps_by_hand(config: TrainingConfig, planned: str) -> None:
    chosen, reason = choose_compile(config, builtin=True)
    assert chosen == "off"
    assert reason.startswith(f"{planned} save about 0 s and")


def test_it_is_on_from_where_it_repays() -> None:
    enough = int(COMPILE_SECONDS / (SECONDS_PER_STEP + 100 * SECONDS_PER_SAMPLE) / 30)  # iterations
    (below, _), (above, reason) = (choose_compile(config_of(1000 * count), builtin=True) for count in (enough, enough + 1))
    assert (below, above) == ("off", "on")
    assert "minibatch steps of 100 samples save about 40 s and compiling takes up to 40 s" in reason


@pytest.mark.parametrize(
    ("config", "builtin", "why"),
    [
        (config_of(10**8, run={"backend": "numpy"}), True, "run.backend=numpy has nothing to compile"),
        (config_of(10**8, gradient_accumulation=2), True, "ppo.gradient_accumulation=2 is not compiled"),
        (config_of(10**8, policy=PolicyConfig(kind="cnn")), True, "convolutions"),
        (config_of(10**8, policy=PolicyConfig(kind="gru")), True, "policy.kind=gru"),
        (config_of(10**8), False, "only built-in policies"),
        (config_of(10**8, optimizer="sgd"), True, "ppo.optimizer=sgd is not compiled"),
    ],
    ids=["numpy", "accumulation", "cnn", "gru", "foreign", "sgd"],
)
def test_what_is_never_compiled(config: TrainingConfig, builtin: bool, why: str) -> None:
    chosen, reason = choose_compile(config, builtin=builtin)
    assert chosen == "off"
    assert why in reason


# ---- warm start
def weights_after(policy: Any, *, steps: int = 2 * BATCH, resume: bool = False, **more: Any) -> tuple[Weights, Weights]:
    """The weights at the beginning and at the end of a run."""
    with PPOTrainer(policy, "CartPole-v1", small_config(ppo=PPOConfig(rollout_steps=STEPS)), **more) as trainer:
        if resume:
            trainer.load_checkpoint()
        before = trainer.policy.get_weights()
        trainer.train(steps)
        return before, trainer.policy.get_weights()


def same_names(one: Weights, other: Weights) -> set[str]:
    return {name for name in one if np.array_equal(one[name], other[name])}


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("of", ["", "policy.safetensors", "checkpoints"])
def test_a_run_begins_with_the_weights_of_another(of: str, backend: str, tmp_path: Path) -> None:
    kind = PolicyConfig(hidden_sizes=(8,), normalize_observations=True, normalize_values=True)
    _, first = weights_after(kind, run_dir=tmp_path / "first")
    before, after = weights_after(kind, init_from=tmp_path / "first" / of, backend=backend, seed=7)
    assert same_names(first, before) == first.keys() - {"policy_version"}  # the normalisers, too
    assert (int(before["policy_version"]), int(after["policy_version"])) == (0, 2)  # there is no warm-up of the normalisers
    assert "actor.head.weight" not in same_names(before, after)
    part, _ = weights_after(kind, init_from=tmp_path / "first", init_weights=["actor.*", "critic.0.weight"], seed=7)
    fresh, _ = weights_after(kind, seed=7)
    chosen = {name for name in first if name.startswith("actor.")} | {"critic.0.weight"}
    assert same_names(part, first) - {*same_names(first, fresh)} == chosen - {*same_names(first, fresh)}
    assert same_names(part, fresh) >= fresh.keys() - chosen


def test_a_warm_start_with_frozen_weights_trains_the_rest(tmp_path: Path) -> None:
    _, first = weights_after(SPEC, run_dir=tmp_path)
    config = small_config(ppo=PPOConfig(rollout_steps=STEPS, freeze=("actor.0.*",)), init_from=str(tmp_path))
    with PPOTrainer(SPEC, "CartPole-v1", config) as trainer:
        assert trainer.warm_start.text == f"beginning with all of the 8 weights from {tmp_path / 'policy.safetensors'}"
        trainer.train()
        assert same_names(first, trainer.policy.get_weights()) == {"actor.0.weight", "actor.0.bias"}
    components = create_training_components(small_config(init_from=str(tmp_path)), SPEC)
    assert same_names(first, components.policy.get_weights()) == first.keys() - {"policy_version"}


def test_a_resumed_run_does_not_read_its_warm_start_again(tmp_path: Path) -> None:
    weights_after(SPEC, run_dir=tmp_path / "first")
    _, whole = weights_after(SPEC, steps=4 * BATCH, init_from=tmp_path / "first", run_dir=tmp_path / "whole")
    weights_after(SPEC, init_from=tmp_path / "first", run_dir=tmp_path / "second")
    (tmp_path / "first").rename(tmp_path / "away")
    _, parts = weights_after(SPEC, steps=4 * BATCH, resume=True, init_from=tmp_path / "first", run_dir=tmp_path / "second")
    assert same_names(whole, parts) == whole.keys()
    with pytest.raises(ConfigError, match=r"run.init_from=.*first: there is no .*first; expected a policy file, a run directory"):
        weights_after(SPEC, init_from=tmp_path / "first")


def test_networks_of_ones_own_and_several_policies_begin_warm(tmp_path: Path) -> None:
    """Only weights are read, so no class is needed."""
    _, first = weights_after(OwnPolicy(4, 2), run_dir=tmp_path / "own")
    before, _ = weights_after(OwnPolicy(4, 2), init_from=tmp_path / "own")
    assert same_names(first, before) == first.keys() - {"policy_version"}
    several = PolicyMap(policies={"red": SPEC, "blue": SPEC}, lane_map=["red", "blue"])
    _, first = weights_after(several, run_dir=tmp_path / "several")
    before, _ = weights_after(several, init_from=tmp_path / "several", init_weights=["red/*"], seed=7)
    assert {name for name in same_names(first, before) if name.endswith(".weight")} == {
        name for name in first if name.startswith("red/") and name.endswith(".weight")
    }


def test_a_warm_start_that_does_not_fit_names_what_differs(tmp_path: Path) -> None:
    weights_after(SPEC, run_dir=tmp_path)
    wide = PolicyConfig(hidden_sizes=(9,))
    shapes = r"the weight actor.0.weight has shape \(8, 4\); the policy needs \(9, 4\); .*"
    with pytest.raises(ConfigError, match=f"run.init_from=.*: {shapes}; run.init_weights takes over a part"):
        weights_after(wide, init_from=tmp_path)
    with pytest.raises(ConfigError, match=r"missing observation_normalizer.count, .*; run.init_weights takes over a part"):
        weights_after(PolicyConfig(hidden_sizes=(8,), normalize_observations=True), init_from=tmp_path)
    with pytest.raises(ConfigError, match=r"missing actor.1.bias, actor.1.weight$"):
        weights_after(PolicyConfig(hidden_sizes=(8, 8)), init_from=tmp_path, init_weights=["actor.[01].*"])
    with pytest.raises(ConfigError, match=r"run.init_weights: no weight of the policy matches 'actr.\*'; close to it: actor"):
        weights_after(SPEC, init_from=tmp_path, init_weights=["actr.*"])
    with pytest.raises(ConfigError, match=r"run.init_from=.*metrics.jsonl cannot be read: .*not a tensor file"):
        weights_after(SPEC, init_from=tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"run.init_weights=\['actor.\*'\] needs run.init_from"):
        weights_after(SPEC, init_weights=["actor.*"])
    with pytest.raises(ConfigError, match=r"run.init_from needs a policy with weights, but RandomActor only acts"):
        PPOTrainer(RandomActor(CARTPOLE.action_space), "CartPole-v1", init_from=tmp_path)


def test_a_config_file_names_a_policy_to_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--env.num-envs=2", "--ppo.rollout-steps=8", "--evaluation.final-episodes=0", "--quiet", "--run.total-timesteps=32"]
    small += ["--ppo.minibatch-size=null"]
    assert main(["train", "CartPole-v1", *small, "--run.name=first"]) == 0
    config = TrainingConfig.from_yaml("runs/first/config.yaml")
    run = config.run.replace(name="second", init_from="first", init_weights=("actor.*",), total_timesteps=16)
    Path("second.yaml").write_text(config.replace(run=run, ppo=config.ppo.replace(freeze=("actor.*",))).to_yaml())
    capsys.readouterr()
    assert main(["train", "--config", "second.yaml"]) == 0
    assert "beginning with 6 of the 12 weights from runs/first/policy.safetensors" in capsys.readouterr().out
    first, second = (load_policy(name).get_weights() for name in ("first", "second"))
    assert {name.partition(".")[0] for name in same_names(first, second)} == {"actor"}
    assert main(["train", "CartPole-v1", *small, "--run.name=third", "--run.init-from=nowhere"]) == 2
    assert main(["train", "CartPole-v1", *small, "--run.name=third", "--ppo.freeze", "nothing.*"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "run.init_from=nowhere: there is no nowhere; expected a policy file" in lines[0]
    assert "ppo.freeze: no weight of the policy matches 'nothing.*'; " in lines[1]
    assert not Path("runs/third").exists()


@pytest.mark.parametrize(("values", "warned"), [(4_096, False), (4_097, True)])
def test_a_wide_one_hot_observation_warns_with_what_to_do(values: int, warned: bool) -> None:
    class Many(Counter):  # type: ignore[misc, no-any-unimported, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Discrete(values)

        def _observe(self) -> int:
            return int(self.steps)

    message = f"observation has {values:,} discrete values, which become a one-hot vector.*encode it as numbers"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PPOTrainer("mlp", Many, num_envs=1).close()
    assert any(re.match(message, str(warning.message)) for warning in caught) == warned
    assert any(re.match(message, note) for note in check_env(Many, steps=5).notes) == warned
