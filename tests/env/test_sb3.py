"""Tests of env/sb3.py: Stable-Baselines3's VecEnvs train as other vector envs do, with true last observations and honest exactness."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from doubles.stepping import frozen, run
from doubles.toys import Corridor
from inchworm import PPOConfig, PPOTrainer, check_env, evaluate_policy, make_vector_env
from inchworm.core.errors import EnvError
from inchworm.core.seeding import derive_seed
from inchworm.env.foreign import BatchedVectorEnv
from inchworm.env.vector_env import NO_SEED

sb3 = pytest.importorskip("stable_baselines3.common.vec_env")

SEED = 5
FIRST = derive_seed(SEED, "vector env")
"""The seed of the first copy's stream; copy i has the next i-th."""


def cartpole():
    return gym.make("CartPole-v1", max_episode_steps=12)


def dummy(*makers):
    return sb3.DummyVecEnv(list(makers) or [cartpole] * 3)


def subprocess():
    return sb3.SubprocVecEnv([cartpole] * 3, start_method="fork")


@pytest.mark.parametrize("make", [dummy, subprocess])
def test_every_row_is_that_of_plain_gymnasium(make):
    with make_vector_env(make(), seed=SEED) as env:
        assert type(env) is BatchedVectorEnv
        steps = run(env, 60)
    worlds = [cartpole() for _ in range(3)]
    seen = [world.reset(seed=FIRST + lane)[0] for lane, world in enumerate(worlds)]
    rng, cut = np.random.default_rng(0), 0
    for before, step in itertools.pairwise(steps):
        np.testing.assert_array_equal(before.observations, seen)
        finals = {ended.lane: ended for ended in step.ended}
        for lane, world in enumerate(worlds):
            action = _drawn(world.action_space, rng)
            seen[lane], reward, terminated, truncated, _ = world.step(action)
            assert step.rewards[lane] == reward
            assert (step.terminated[lane], step.truncated[lane]) == (terminated, truncated and not terminated)
            assert (lane in finals) == (terminated or truncated) == step.episode_starts[lane]
            if lane in finals:
                np.testing.assert_array_equal(finals[lane].final_observation, seen[lane])  # not the first of the next episode
                assert (finals[lane].seed, dict(finals[lane].info)) == (NO_SEED, {})
                cut += bool(truncated and not terminated)
                seen[lane] = world.reset()[0]
    assert cut > 2


def _drawn(space, rng):
    """The action that `run` has drawn for a lane."""
    return int(rng.choice(np.arange(space.n)))


def test_a_trainer_takes_one_and_says_that_a_resume_is_not_exact(tmp_path):
    with PPOTrainer("mlp", dummy(), PPOConfig(rollout_steps=16, num_minibatches=2), seed=SEED, run_dir=tmp_path) as trainer:
        assert (trainer.config.env.id, trainer.config.env.num_envs) == ("DummyVecEnv", 3)
        assert "a resumed run starts new episodes" in trainer.inexact[0]
        trainer.train(total_timesteps=96)
    with PPOTrainer("mlp", dummy(), PPOConfig(rollout_steps=16, num_minibatches=2), seed=SEED, run_dir=tmp_path) as again:
        with pytest.warns(UserWarning, match="lanes 0, 1, 2 could not be restored"):
            again.load_checkpoint()
        again.train(total_timesteps=192)
        assert again.total_timesteps == 192


def test_wrappers_are_kept_and_their_last_observations_are_used():
    stacked = sb3.VecMonitor(sb3.VecFrameStack(dummy(), 2))
    with make_vector_env(stacked, seed=SEED) as env:
        assert env.observation_space.shape == (8,)
        steps = run(env, 30)
    ended = [(before, episode) for before, step in itertools.pairwise(steps) for episode in step.ended]
    assert ended
    for before, episode in ended:  # the older frame is the newer one of the step before
        np.testing.assert_array_equal(episode.final_observation[:4], before.observations[episode.lane, 4:])


def test_vec_normalize_is_refused_wherever_it_is_with_what_to_set_instead():
    for wrapped in (sb3.VecNormalize(dummy()), sb3.VecMonitor(sb3.VecNormalize(dummy()))):
        with pytest.raises(EnvError, match=r"VecNormalize is refused.*env\.venv.*policy\.normalize_observations=true.*ppo\.scale_rewards"):
            PPOTrainer("mlp", wrapped)


class Masked(Corridor):
    """It allows one action, which changes with every step."""

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        assert self.action_masks()[action]
        self.count += 1
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated or self.count == 7, {**info, "count": self.count, "name": "x"}

    def action_masks(self):
        return np.arange(self.action_space.n) == self.count % self.action_space.n


def test_masks_of_the_environments_are_used_and_the_numbers_of_infos_kept():
    with make_vector_env(dummy(Masked, Masked), seed=SEED) as env:
        steps = run(env, 30)  # an action that is not allowed would raise
    assert set(steps[0].observations) == {"observation", "action_mask"}
    ended = [episode for step in steps for episode in step.ended]
    assert [episode.info["count"] for episode in ended] == [7.0] * len(ended)
    assert all((episode.final_observation["action_mask"] == 1).all() for episode in ended)
    assert len(ended) >= 6


class Places(gym.Env):
    """Observations of several parts."""

    observation_space = spaces.Dict({"n": spaces.Discrete(9), "x": spaces.Box(-1.0, 1.0, (2,), np.float32)})
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return self._seen(), {}

    def step(self, action):
        self.n += 1
        return self._seen(), float(action[0]), False, self.n == 5, {}

    def _seen(self):
        return {"n": self.n, "x": self.np_random.uniform(-1, 1, 2).astype(np.float32)}


def test_dict_observations():
    with make_vector_env(dummy(Places, Places), seed=SEED) as env:
        steps = run(env, 5)
    assert steps[4].observations["n"].tolist() == [4, 4]
    assert steps[5].observations["n"].tolist() == [0, 0]
    assert [int(episode.final_observation["n"]) for episode in steps[5].ended] == [5, 5]
    assert steps[5].truncated.all()


def test_it_resets_itself_so_single_lanes_and_options_are_refused():
    with make_vector_env(dummy(), seed=SEED) as env:
        env.reset()
        with pytest.raises(EnvError, match=r"resets itself, so only all 3 lanes can be reset, not \[1\] alone"):
            env.reset(indices=[1])
    with make_vector_env(dummy(), seed=SEED) as env, pytest.raises(EnvError, match="resets itself, without options"):
        env.set_reset_options({"low": 0.0})


class Forgetful(sb3.VecEnvWrapper):
    """It drops what the infos hold."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, rewards, dones, [{} for _ in infos]


def test_one_that_loses_last_observations_is_refused_with_what_it_must_keep():
    with make_vector_env(Forgetful(dummy()), seed=SEED) as env, pytest.raises(EnvError, match=r"Forgetful: .*no 'terminal_observation'"):
        run(env, 60)


class Kept(sb3.DummyVecEnv):
    """It can say where it stands, and be put there."""

    def get_state(self):
        cores = [env.unwrapped for env in self.envs]
        return {
            "states": [np.array(core.state) for core in cores],
            "random": [str(core.np_random.bit_generator.state["state"]) for core in cores],
            "elapsed": [env._elapsed_steps for env in self.envs],
        }

    def set_state(self, state):
        for env, own, elapsed in zip(self.envs, state["states"], state["elapsed"]):
            env.unwrapped.state, env._elapsed_steps = np.array(own), elapsed


def test_one_with_get_state_and_set_state_is_restored():
    env = make_vector_env(Kept([cartpole] * 2), seed=SEED)
    assert env.exact
    run(env, 3)
    other = make_vector_env(Kept([cartpole] * 2), seed=99)
    other.load_state_dict(env.state_dict())
    np.testing.assert_array_equal(other.reset(indices=()).observations, env.reset(indices=()).observations)
    actions = np.array([0, 1])
    np.testing.assert_array_equal(frozen(other.step(actions)).observations, env.step(actions).observations)
    assert not make_vector_env(sb3.VecMonitor(Kept([cartpole] * 2))).exact  # the state of a wrapper is not in it


def test_check_env_checks_it_and_leaves_it_open():
    given = dummy()
    assert check_env(given, steps=60).ok
    given.reset()


def _autoreset():
    return gym.vector.SyncVectorEnv([cartpole] * 3, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("make", [dummy, _autoreset])
@pytest.mark.filterwarnings("ignore:the episodes of this environment cannot be given seeds")
def test_it_is_evaluated_over_more_episodes_than_it_has_lanes_and_left_open(make):
    with PPOTrainer("mlp", "CartPole-v1", num_envs=1) as trainer:
        policy = trainer.policy
    given = make()
    stats = evaluate_policy(policy, given, episodes=8)
    assert len(stats.returns) == 8
    assert stats.lengths.max() <= 12  # the limit of these copies: whole episodes, none counted together with the next
    np.testing.assert_array_equal(stats.returns, stats.lengths)
    assert not getattr(given, "closed", False)
    given.reset()
    with pytest.raises(EnvError, match="cut off after 2 steps, and this vector env begins episodes only by itself"):
        evaluate_policy(policy, given, episodes=8, max_episode_steps=2)


def test_a_central_critic_another_number_of_copies_and_a_factory_are_refused():
    with pytest.raises(EnvError, match="DummyVecEnv has no global state"):
        make_vector_env(dummy(), global_state=True)
    with pytest.raises(Exception, match=r"num_envs=2, but the DummyVecEnv has 3 lane\(s\)"):
        PPOTrainer("mlp", dummy(), num_envs=2)
    with pytest.raises(EnvError, match=r"returned DummyVecEnv, not a gymnasium\.Env; give a vector env itself to PPOTrainer"):
        PPOTrainer("mlp", dummy)
