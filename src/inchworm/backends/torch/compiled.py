"""Steps 8 and 9 of 9, compiled: a whole minibatch step as one functional graph, from the minibatch to the updated weights.

Weights, moments, statistics, learning rate and coefficients are inputs of the graph, so that neither schedules nor normalisers
cause another compilation; minibatches are padded to one shape. The graph reads nothing back to the host, so on a GPU it could be
captured as a CUDA graph (untested).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

from inchworm.backends.learner import BETA_MEAN, BETA_SQUARE, StepMetrics
from inchworm.backends.torch.loss import TERMS, normalize, ppo_loss
from inchworm.backends.torch.optimizer import Adam
from inchworm.backends.torch.policy import TorchPolicy
from inchworm.config.sections import PPOConfig
from inchworm.core.errors import InchwormError
from inchworm.core.types import Evaluation, LossCoefficients, Minibatch, Tree

FIELDS = ("observations", "actions", "log_probs", "advantages", "returns", "values", "valid", "episode_starts", "global_state")
"""The fields of a minibatch that the loss and the built-in policies read."""
COLUMNS = (*TERMS, "grad_norm", "bad", "empty")
"""The results of a step, in order."""
STATISTICS = ("center", "inverse_std", "value_mean", "value_std")
"""The buffers of the network with the normalisers' numbers."""
GLOBAL_STATISTICS = ("global_center", "global_inverse_std")
"""Those of a central critic."""
NO_COMPILER = "ppo.compile=on needs a C++ compiler, and none was found; install g++ or clang, or set ppo.compile=off"
OPTIONS = {"cpp.use_decompose_tanh": True}
"""Options of torch's code generator: tanh by exp halves the time of everything but the matrix products, with an error of 1e-7."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class _Evaluate(nn.Module):
    """`evaluate` as a forward pass, which torch can call with other tensors in place of the parameters."""

    def __init__(self, policy: TorchPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, minibatch: Minibatch) -> Evaluation:
        """Evaluate a minibatch."""
        return self.policy.evaluate(minibatch)


class CompiledStep:
    """Minibatch steps of a built-in policy with the built-in Adam; one graph for each shape of minibatch."""

    def __init__(self, policy: TorchPolicy, config: PPOConfig, adam: Adam) -> None:
        self._module, self._network, self._config, self._adam = _Evaluate(policy), policy.network, config, adam
        named = {id(parameter): name for name, parameter in self._module.named_parameters()}
        self._names = [named[id(parameter)] for parameter in adam.parameters]
        self._statistics = (*STATISTICS, *(GLOBAL_STATISTICS if policy.central_critic else ()))
        trained = {id(parameter) for parameter in adam.parameters}
        frozen = {name: part for name, part in self._module.named_parameters() if id(part) not in trained and part.numel()}
        self._frozen = list(frozen.values())
        """Parameters that are not trained: inputs of the graph, too, because a checkpoint may set them."""
        self._places = [*[f"policy.network.{name}" for name in self._statistics], *frozen]
        self._graphs: dict[Any, Callable[..., Tensor]] = {}
        self._numbers: tuple[tuple[float, ...], Tensor] = (), adam.mean

    def run(self, minibatches: Sequence[Minibatch], coefficients: LossCoefficients) -> StepMetrics:
        """Take one step on each minibatch, in order."""
        adam, c = self._adam, coefficients
        numbers = (adam.learning_rate, c.clip_coef, c.vf_coef, c.ent_coef, c.vf_clip_coef)
        if self._numbers[0] != numbers:  # as a tensor, made again only when they change
            self._numbers = numbers, torch.tensor(numbers, dtype=adam.mean.dtype, device=adam.mean.device)
        statistics = [getattr(self._network, name) for name in self._statistics]
        fixed = [*adam.parameters, adam.mean, adam.square, adam.steps, self._numbers[1], *statistics, *self._frozen]
        rows = []
        with torch.no_grad():
            for minibatch in minibatches:
                tree: Tree = {name: getattr(minibatch, name) for name in FIELDS}
                leaves, structure = optree.tree_flatten(tree)
                key = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
                if key not in self._graphs:
                    self._graphs[key] = self._compile(structure, [*fixed, *leaves])
                rows.append(self._graphs[key](*fixed, *leaves))
        columns = torch.stack(rows).double().cpu().numpy()  # [n, columns]
        return dict(zip(COLUMNS, columns.T))

    def _compile(self, structure: Any, inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
        """Compile the step for inputs like these."""

        def step(*flat: Tensor) -> Tensor:
            return self._step(structure, list(flat))

        with cache_directory():
            import torch._inductor  # slow to import
            from torch._inductor.exc import InvalidCxxCompiler
            from torch.fx.experimental.proxy_tensor import make_fx

            known = torch._inductor.list_options()
            options = {name: value for name, value in OPTIONS.items() if name in known}
            graph = make_fx(step)(*[_like(tensor) for tensor in inputs])
            try:
                return torch._inductor.compile(graph, [_like(tensor) for tensor in inputs], options=options)  # type: ignore[no-any-return]
            except InvalidCxxCompiler as error:
                raise InchwormError(NO_COMPILER) from error

    def _step(self, structure: Any, flat: list[Tensor]) -> Tensor:
        """The step to compile: forward, loss, gradient, clip, Adam; the metrics as one vector."""
        count = len(self._names)
        parameters, (mean, square, steps, numbers), rest = flat[:count], flat[count : count + 4], flat[count + 4 :]
        constants, leaves = rest[: len(self._places)], rest[len(self._places) :]
        minibatch = Minibatch(**optree.tree_unflatten(structure, leaves))
        if self._config.normalize_advantages == "minibatch":
            minibatch = replace(minibatch, advantages=normalize(minibatch.advantages, minibatch.valid))
        learning_rate, clip_coef, vf_coef, ent_coef, vf_clip_coef = numbers.unbind()
        entropy_weight: Any = ent_coef if self._config.ent_coef else 0.0
        weights: Any = clip_coef, vf_coef, entropy_weight, self._config.clip_vloss, vf_clip_coef
        coefficients = LossCoefficients(*weights)
        valid_count = minibatch.valid.sum()
        with torch.enable_grad():
            learned = [parameter.detach().requires_grad_() for parameter in parameters]
            tensors = dict(zip([*self._names, *self._places], [*learned, *constants]))
            terms = ppo_loss(functional_call(self._module, tensors, (minibatch,)), minibatch, coefficients, valid_count)
            parts = torch.autograd.grad(terms["loss"], learned, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([part.reshape(-1) for part in parts])
        norm = torch.linalg.vector_norm(gradient)
        if self._config.max_grad_norm is not None:
            gradient = gradient * (self._config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        bad, empty = ~torch.isfinite(terms["loss"].detach() + norm), valid_count == 0
        self._move(parameters, (mean, square, steps), gradient, learning_rate, bad | empty)
        scalars = [*(terms[name].detach() for name in TERMS), norm, bad, empty]
        return torch.stack([scalar.to(mean.dtype) for scalar in scalars])

    def _move(
        self, parameters: list[Tensor], moments: tuple[Tensor, Tensor, Tensor] | list[Tensor], gradient: Tensor, rate: Tensor, skip: Tensor
    ) -> None:
        """Adam as in `optimizer`, as a select: where `skip` is true nothing changes."""
        mean, square, steps = moments
        after = steps + 1
        new_mean = mean + (1 - BETA_MEAN) * (gradient - mean)
        new_square = BETA_SQUARE * square + (1 - BETA_SQUARE) * gradient * gradient
        # 1 - betaᵗ in float64: for small t it is the small difference of two numbers near 1.
        mean_share, square_share = (-torch.expm1(after.double() * math.log(beta)).to(mean.dtype) for beta in (BETA_MEAN, BETA_SQUARE))
        change = rate / mean_share * new_mean / ((new_square / square_share).sqrt() + self._adam.eps)
        for parameter, part in zip(parameters, torch.split(change, self._adam.sizes)):
            shrunk = parameter * (1 - rate * self._adam.weight_decay) if self._adam.weight_decay else parameter
            parameter.copy_(torch.where(skip, parameter, shrunk - part.view_as(parameter)))
        for moment, new in ((mean, new_mean), (square, new_square), (steps, after)):
            moment.copy_(torch.where(skip, moment, new))


def _like(tensor: Tensor) -> Tensor:
    """A copy with the same strides, for which a graph is made; tracing runs the graph once."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return twin.copy_(tensor.detach())


@contextlib.contextmanager
def cache_directory() -> Iterator[None]:
    """Keep compiled graphs in the user's cache directory, which survives a reboot, unless torch's own variable is set."""
    before = os.environ.get(CACHE_VARIABLE)
    if before is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ[CACHE_VARIABLE] = str(home / "inchworm" / "torchinductor")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(CACHE_VARIABLE, None)
