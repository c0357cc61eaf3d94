"""A correct user-defined policy, and one broken in each way that `check_policy` must find. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from doubles.toys import SpacesEnv
from inchworm.core.types import Evaluation, PolicyStep

SIZE, ACTIONS, WIDTH = 3, 3, 8


def world() -> SpacesEnv:
    """Three numbers to see, three actions of which some are legal; an illegal one raises."""
    return SpacesEnv(spaces.Box(-1.0, 1.0, (SIZE,), np.float32), spaces.Discrete(ACTIONS), mask="key")


class Careful(nn.Module):
    """A GRU cell between a normaliser and two heads; memory is kept by the caller; masks are obeyed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.cell, self.actor, self.critic = nn.GRUCell(SIZE, WIDTH), nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)
            self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("center", torch.zeros(SIZE))
        self.policy_version = 0

    def initial_state(self, num_lanes: int) -> Any:
        return np.zeros((num_lanes, WIDTH), np.float32)

    def forget(self, state: Tensor, starts: Tensor) -> Tensor:
        return state * (~starts)[:, None]

    def read(self, observations: Any, state: Tensor, starts: Tensor) -> Tensor:
        """One row: forget, read, remember."""
        after: Tensor = self.cell(observations["observation"] - self.center, self.forget(state, starts)) * self.frozen
        return after

    def logits(self, observations: Any, features: Tensor) -> Tensor:
        allowed = observations["action_mask"].bool()
        logs: Tensor = torch.where(allowed, self.actor(features), torch.tensor(-1e9)).log_softmax(-1)
        return logs

    def over(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        """Features [L, N, width]."""
        state, features = torch.as_tensor(state), []
        for row in range(len(starts)):
            state = self.read({key: part[row] for key, part in observations.items()}, state, starts[row])
            features.append(state)
        return torch.stack(features)

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        with torch.no_grad():
            rows = {key: torch.from_numpy(np.array(part)) for key, part in observations.items()}
            after = self.read(rows, torch.from_numpy(np.array(state)), torch.from_numpy(np.array(episode_starts)))
            logs = self.logits(rows, after).numpy()
        return self.choose(logs, after.numpy(), rng, deterministic)

    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        noise = 0.0 if deterministic else -np.log(-np.log(rng.random(logs.shape)))
        actions = (logs + noise).argmax(-1)
        return PolicyStep(actions, actions, logs[np.arange(len(logs)), actions], after)

    def value(self, observations: Any, state: Any, episode_starts: Any) -> Tensor:
        with torch.no_grad():
            rows = {key: torch.as_tensor(part) for key, part in observations.items()}
            values: Tensor = self.critic(self.over(rows, state, torch.as_tensor(episode_starts))).squeeze(-1)
            return values

    def evaluate(self, minibatch: Any) -> Evaluation:
        features = self.over(minibatch.observations, minibatch.policy_state, minibatch.episode_starts)
        logs = self.logits(minibatch.observations, features)
        chosen = logs.gather(-1, minibatch.actions.long()[..., None]).squeeze(-1)
        return Evaluation(chosen, -(logs.exp() * logs).sum(-1), self.critic(features).squeeze(-1), 1.0)

    def update_statistics(self, rollout: Any, returns: Any) -> None:
        del returns
        self.center.add_(0.1 * torch.from_numpy(np.array(rollout.observations["observation"])).mean((0, 1)))

    def get_weights(self) -> dict[str, np.ndarray]:
        return {name: value.detach().numpy().copy() for name, value in self.state_dict().items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})


class Forgetful(Careful):
    """No memory at all, and says so."""

    def initial_state(self, num_lanes: int) -> Any:
        del num_lanes
        return ()

    def read(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        del state
        nothing = torch.zeros(len(starts), WIDTH)
        return super().read(observations, nothing, starts)

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        step = super().act(observations, np.zeros(0), episode_starts, rng, deterministic=deterministic)
        return replace(step, state=state)

    def over(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        del state
        return super().over(observations, np.zeros(0, np.float32), starts)


# ---- one fault each


class NotAnInt(Careful):
    def __init__(self) -> None:
        super().__init__()
        self.policy_version = np.int64(0)


class WrongShape(Careful):
    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        step = super().choose(logs, after, rng, deterministic)
        return replace(step, log_probs=step.log_probs[:, None])


class Outside(Careful):
    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        step = super().choose(logs, after, rng, deterministic)
        return replace(step, env_actions=step.actions + 1)


class OtherState(Careful):
    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        return super().choose(logs, {"memory": after}, rng, deterministic)


class Scribbler(Careful):
    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        state *= ~np.asarray(episode_starts)[:, None]
        observations["observation"] *= 2
        return super().act(observations, state, episode_starts, rng, deterministic=deterministic)


class WrongEvaluation(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        answer = super().evaluate(minibatch)
        return replace(answer, values=answer.values[..., None], log_probs=answer.log_probs.detach())


class Raising(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        raise KeyError("features")


class GlobalNoise(Careful):
    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        stream = np.random.default_rng(random.getrandbits(32))
        rng.random()
        return super().choose(logs, after, stream, deterministic)


class OwnMemory(Forgetful):
    """Remembers inside of itself."""

    def read(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().read(observations, state, starts) * (1 + 0.01 * self.calls)


class NeverSamples(Careful):
    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        return super().choose(logs, after, rng, True)


class AlwaysSamples(Careful):
    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        return super().choose(logs, after, rng, False)


class IgnoresMasks(Careful):
    def logits(self, observations: Any, features: Tensor) -> Tensor:
        return self.actor(features).log_softmax(-1)


class MasksAfterwards(Careful):
    """Takes legal actions only, but with the probabilities of before."""

    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        step = super().choose(logs, after, rng, deterministic)
        free = self.actor(torch.from_numpy(after)).log_softmax(-1).detach().numpy()
        return replace(step, log_probs=free[np.arange(len(free)), step.actions])


class EvaluatesUnmasked(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        every = {**minibatch.observations, "action_mask": torch.ones_like(minibatch.observations["action_mask"])}
        return super().evaluate(replace(minibatch, observations=every))


class MixesLanes(Careful):
    def read(self, observations: Any, state: Tensor, starts: Tensor) -> Tensor:
        seen = observations["observation"]
        return super().read({**observations, "observation": seen - 0.5 * seen.mean(0)}, state, starts)


class CountsLanes(Careful):
    def read(self, observations: Any, state: Tensor, starts: Tensor) -> Tensor:
        return super().read(observations, state, starts) + torch.arange(len(starts))[:, None] * 0.1


class MixesLearning(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        answer = super().evaluate(minibatch)
        return replace(answer, values=answer.values - 0.5 * answer.values.mean(1, keepdim=True))

    def value(self, observations: Any, state: Any, episode_starts: Any) -> Tensor:
        values = super().value(observations, state, episode_starts)
        return values - 0.5 * values.mean(1, keepdim=True)


class NeverFed(Careful):
    """Memory that is never fed: act returns what it was given."""

    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        return super().choose(logs, np.zeros_like(after), rng, deterministic)


class NeverRead(Careful):
    """Remembers, but acts on the observation alone."""

    def logits(self, observations: Any, features: Tensor) -> Tensor:
        seen = observations["observation"]
        return super().logits(observations, nn.functional.pad(seen, (0, WIDTH - SIZE)))


class NeverForgets(Careful):
    def forget(self, state: Tensor, starts: Tensor) -> Tensor:
        del starts
        return state


class ForgetsAll(Careful):
    """One lane's new episode makes all forget."""

    def forget(self, state: Tensor, starts: Tensor) -> Tensor:
        return state * (~starts.any())


class LearnsWithoutMemory(Careful):
    def over(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        rows = range(len(starts))
        first = torch.zeros(starts.shape[1], WIDTH)
        return torch.stack([self.read({key: part[row] for key, part in observations.items()}, first, starts[row]) for row in rows])


class LearnsFromNothing(Careful):
    """Every sequence begins with an empty memory."""

    def over(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        return super().over(observations, torch.zeros_like(torch.as_tensor(state)), starts)


class LearnsOverEnds(Careful):
    """Forgets in acting, but not inside a sequence."""

    def over(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        return super().over(observations, state, torch.zeros_like(starts))


class CutsTime(Careful):
    def read(self, observations: Any, state: Tensor, starts: Tensor) -> Tensor:
        return super().read(observations, state.detach(), starts)


class OtherTemperature(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        answer = super().evaluate(minibatch)
        return replace(answer, log_probs=1.01 * answer.log_probs)


class OtherUnits(Careful):
    def value(self, observations: Any, state: Any, episode_starts: Any) -> Tensor:
        return 10 * super().value(observations, state, episode_starts) + 1


class LooseHead(Careful):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(WIDTH, 1)


class ZeroHead(Careful):
    """Sound: a head of zeros, behind which nothing gets a gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.before = nn.Parameter(torch.ones(()))

    def logits(self, observations: Any, features: Tensor) -> Tensor:
        return super().logits(observations, features * (1 + self.scale * self.before))


class SharesWeights(Careful):
    def get_weights(self) -> dict[str, np.ndarray]:
        return {name: value.detach().numpy() for name, value in self.state_dict().items()}


class LosesBuffer(Careful):
    def get_weights(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in super().get_weights().items() if name != "center"}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()}, strict=False)


class LosesParameter(LosesBuffer):
    def get_weights(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in Careful.get_weights(self).items() if name != "actor.bias"}


class ListOfWeights(Careful):
    def get_weights(self) -> Any:
        return list(super().get_weights().values())


class DropsOut(Careful):
    """Dropout that stays on in acting and learning."""

    def read(self, observations: Any, state: Tensor, starts: Tensor) -> Tensor:
        return nn.functional.dropout(super().read(observations, state, starts), 0.5)


class DropsOutInEvaluate(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        answer = super().evaluate(minibatch)
        return replace(answer, log_probs=nn.functional.dropout(answer.log_probs, 0.5))


class DropsOutWhileLearning(Careful):
    """Sound but worth a note: only where gradients are on."""

    def evaluate(self, minibatch: Any) -> Evaluation:
        answer = super().evaluate(minibatch)
        return replace(answer, log_probs=nn.functional.dropout(answer.log_probs, 0.5, training=torch.is_grad_enabled()))


class BlindCritic(Careful):
    """Sound but worth a note: the critic sees the present alone."""

    def see(self, observations: Any) -> Tensor:
        return self.critic(nn.functional.pad(observations["observation"], (0, WIDTH - SIZE))).squeeze(-1)

    def evaluate(self, minibatch: Any) -> Evaluation:
        return replace(super().evaluate(minibatch), values=self.see(minibatch.observations))

    def value(self, observations: Any, state: Any, episode_starts: Any) -> Tensor:
        with torch.no_grad():
            return self.see({key: torch.as_tensor(part) for key, part in observations.items()})


class InfiniteGradient(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        answer = super().evaluate(minibatch)
        return replace(answer, values=answer.values + 0 * torch.sqrt(0 * answer.values))
