"""A correct user-defined policy, and one broken in each way that `check_policy` must find. Imports torch."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import dropout

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
        return self.cell(observations["observation"] - self.center, self.forget(state, starts)) * self.frozen

    def logits(self, observations: Any, features: Tensor) -> Tensor:
        allowed = observations["action_mask"].bool()
        return torch.where(allowed, self.actor(features), torch.tensor(-1e9)).log_softmax(-1)

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
            return self.critic(self.over(rows, state, torch.as_tensor(episode_starts))).squeeze(-1)

    def evaluate(self, minibatch: Any) -> Evaluation:
        features = self.over(minibatch.observations, minibatch.policy_state, minibatch.episode_starts)
        logs = self.logits(minibatch.observations, features)
        chosen = logs.gather(-1, minibatch.actions.long()[..., None]).squeeze(-1)
        return Evaluation(chosen, -(logs.exp() * logs).sum(-1), self.critic(features).squeeze(-1), 1.0)

    def update_statistics(self, rollout: Any, returns: Any) -> None:
        self.center.add_(0.1 * torch.from_numpy(np.array(rollout.observations["observation"])).mean((0, 1)))

    def get_weights(self) -> dict[str, np.ndarray]:
        return {name: value.detach().numpy().copy() for name, value in self.state_dict().items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})


class Forgetful(Careful):
    """No memory at all, and says so."""

    def initial_state(self, num_lanes: int) -> Any:
        return ()

    def read(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        return super().read(observations, torch.zeros(len(starts), WIDTH), starts)

    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        step = super().act(observations, np.zeros(0), episode_starts, rng, deterministic=deterministic)
        return replace(step, state=state)

    def over(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        return super().over(observations, np.zeros(0, np.float32), starts)


# ---- one fault each
def returning(method: str, change: Callable[[Any], Any]) -> type[Careful]:
    """A policy that changes what one method returns."""

    def changed(self: Careful, *args: Any, **kwargs: Any) -> Any:
        return change(getattr(Careful, method)(self, *args, **kwargs))

    return type("Changed", (Careful,), {method: changed})


def given(method: str, change: Callable[..., tuple[Any, ...]]) -> type[Careful]:
    """A policy that changes what one method gets."""
    return type("Changed", (Careful,), {method: lambda self, *args: getattr(Careful, method)(self, *change(*args))})


def unmasked(observations: Any) -> Any:
    return {**observations, "action_mask": torch.ones_like(observations["action_mask"])}


WrongShape = returning("choose", lambda step: replace(step, log_probs=step.log_probs[:, None]))
Outside = returning("choose", lambda step: replace(step, env_actions=step.actions + 1))
OtherState = returning("choose", lambda step: replace(step, state={"memory": step.state}))
NeverSamples = given("choose", lambda logs, after, rng, _: (logs, after, rng, True))
AlwaysSamples = given("choose", lambda logs, after, rng, _: (logs, after, rng, False))
NeverFed = given("choose", lambda logs, after, *rest: (logs, np.zeros_like(after), *rest))  # act returns the memory that it was given

WrongEvaluation = returning("evaluate", lambda said: replace(said, values=said.values[..., None], log_probs=said.log_probs.detach()))
Raising = returning("evaluate", lambda _: {}["features"])
EvaluatesUnmasked = given("evaluate", lambda minibatch: (replace(minibatch, observations=unmasked(minibatch.observations)),))
OtherTemperature = returning("evaluate", lambda said: replace(said, log_probs=1.01 * said.log_probs))
InfiniteGradient = returning("evaluate", lambda said: replace(said, values=said.values + 0 * torch.sqrt(0 * said.values)))
DropsOutInEvaluate = returning("evaluate", lambda said: replace(said, log_probs=dropout(said.log_probs, 0.5)))
DropsOutWhileLearning = returning(  # sound but worth a note: only where gradients are on
    "evaluate", lambda said: replace(said, log_probs=dropout(said.log_probs, 0.5, training=torch.is_grad_enabled()))
)
OtherUnits = returning("value", lambda values: 10 * values + 1)

CountsLanes = returning("read", lambda features: features + torch.arange(len(features))[:, None] * 0.1)
DropsOut = returning("read", lambda features: dropout(features, 0.5))  # in acting and learning
CutsTime = given("read", lambda seen, state, starts: (seen, state.detach(), starts))
NeverForgets = given("forget", lambda state, starts: (state, torch.zeros_like(starts)))
ForgetsAll = given("forget", lambda state, starts: (state, starts.any().expand(len(starts))))  # as soon as one lane starts an episode
LearnsFromNothing = given("over", lambda seen, state, starts: (seen, torch.zeros_like(torch.as_tensor(state)), starts))
LearnsOverEnds = given("over", lambda seen, state, starts: (seen, state, torch.zeros_like(starts)))  # forgets in acting only


NeverRead = given(  # remembers, but acts on the observation alone
    "logits", lambda seen, _: (seen, nn.functional.pad(seen["observation"], (0, WIDTH - SIZE)))
)
MixesLanes = given("read", lambda seen, *rest: ({**seen, "observation": seen["observation"] - 0.5 * seen["observation"].mean(0)}, *rest))
ListOfWeights = returning("get_weights", lambda weights: list(weights.values()))


def losing(name: str) -> type[Careful]:
    """A policy whose weights lack one tensor."""

    def set_weights(self: Careful, weights: Mapping[str, np.ndarray]) -> None:
        self.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()}, strict=False)

    lacking = returning("get_weights", lambda weights: {kept: value for kept, value in weights.items() if kept != name})
    return type("Losing", (lacking,), {"set_weights": set_weights})


LosesBuffer = losing("center")
LosesParameter = losing("actor.bias")


class NotAnInt(Careful):
    def __init__(self) -> None:
        super().__init__()
        self.policy_version = np.int64(0)


class Scribbler(Careful):
    def act(self, observations: Any, state: Any, episode_starts: Any, rng: Any, *, deterministic: bool = False) -> PolicyStep:
        state *= ~np.asarray(episode_starts)[:, None]
        observations["observation"] *= 2
        return super().act(observations, state, episode_starts, rng, deterministic=deterministic)


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


class IgnoresMasks(Careful):
    def logits(self, observations: Any, features: Tensor) -> Tensor:
        return self.actor(features).log_softmax(-1)


class MasksAfterwards(Careful):
    """Takes legal actions only, but with the probabilities of before."""

    def choose(self, logs: np.ndarray, after: Any, rng: Any, deterministic: bool) -> PolicyStep:
        step = super().choose(logs, after, rng, deterministic)
        free = self.actor(torch.from_numpy(after)).log_softmax(-1).detach().numpy()
        return replace(step, log_probs=free[np.arange(len(free)), step.actions])


class MixesLearning(Careful):
    def evaluate(self, minibatch: Any) -> Evaluation:
        answer = super().evaluate(minibatch)
        return replace(answer, values=answer.values - 0.5 * answer.values.mean(1, keepdim=True))

    def value(self, observations: Any, state: Any, episode_starts: Any) -> Tensor:
        values = super().value(observations, state, episode_starts)
        return values - 0.5 * values.mean(1, keepdim=True)


class LearnsWithoutMemory(Careful):
    def over(self, observations: Any, state: Any, starts: Tensor) -> Tensor:
        rows = range(len(starts))
        first = torch.zeros(starts.shape[1], WIDTH)
        return torch.stack([self.read({key: part[row] for key, part in observations.items()}, first, starts[row]) for row in rows])


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


class BlindCritic(Careful):
    """Sound but worth a note: the critic sees the present alone."""

    def see(self, observations: Any) -> Tensor:
        return self.critic(nn.functional.pad(observations["observation"], (0, WIDTH - SIZE))).squeeze(-1)

    def evaluate(self, minibatch: Any) -> Evaluation:
        return replace(super().evaluate(minibatch), values=self.see(minibatch.observations))

    def value(self, observations: Any, state: Any, episode_starts: Any) -> Tensor:
        with torch.no_grad():
            return self.see({key: torch.as_tensor(part) for key, part in observations.items()})
