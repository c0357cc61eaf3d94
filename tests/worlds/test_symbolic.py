"""Expressions are built as trees in prefix order, under a mask, and scored by their fit to data."""

import numpy as np
import pytest

from inchworm import RandomActor, make_vector_env
from inchworm.env.check import check_env
from inchworm.worlds.symbolic import LAWS, TOKENS, SymbolicDiscovery, evaluate, target_laws, to_text

PREFIX = {
    "ideal_gas": "/ * x0 x1 x2",
    "kinetic_energy": "* x0 * x1 x1",
    "gravitation": "/ * x0 x1 * x2 x2",
    "pendulum": "sqrt / x0 x1",
    "lenses": "/ * x0 x1 + x0 x1",
    "lorentz_factor": "/ 1 sqrt - 1 * x0 x0",
    "projectile": "/ * * x0 x0 sin + x1 x1 x2",
    "cubic": "* x0 + 1 + x0 * x0 x0",
}


def built(env, text):
    """The last step of an episode in which an expression is built."""
    for name in text.split():
        step = env.step(TOKENS.index(name))
    return step


@pytest.mark.parametrize("law", LAWS)
def test_every_law_can_be_written_and_is_then_found(law) -> None:
    env = SymbolicDiscovery(law)
    env.reset(seed=0)
    _, reward, over, _, info = built(env, PREFIX[law])
    assert over
    assert reward == pytest.approx(1.0, abs=1e-9)
    assert info["is_success"] == 1.0
    assert len(PREFIX[law].split()) <= env.max_length
    env.reset(seed=0)
    assert built(env, "+ x0 1")[4]["is_success"] == 0.0
    assert env.best_expression()[0] == pytest.approx(1.0, abs=1e-9)


def test_the_reward_by_hand() -> None:
    """y = (1, 2, 6) of x = (1, 2, 3): the factor of x is (1 + 4 + 18) / 14; the deviations of y from its mean are -2, -1 and 3."""
    env = SymbolicDiscovery()
    env.reset(options={"inputs": [[1.0], [2.0], [3.0]], "outputs": [1.0, 2.0, 6.0]})
    _, reward, over, _, info = env.step(TOKENS.index("x0"))
    residuals = np.array([1.0, 2.0, 6.0]) - 23 / 14 * np.array([1.0, 2.0, 3.0])
    error = np.sqrt(np.mean(residuals**2)) / np.sqrt(14 / 3)
    assert over
    assert reward == pytest.approx(1 / (1 + error))
    assert info["error"] == pytest.approx(error)
    env.reset(options={"inputs": [[0.0], [2.0], [3.0]], "outputs": [1.0, 2.0, 6.0]})
    assert built(env, "/ 1 x0")[1] == 0.0, "not finite"


def test_the_mask_leaves_what_can_be_completed() -> None:
    env = SymbolicDiscovery("kinetic_energy", max_length=3)
    seen, _ = env.reset(seed=0)

    def allowed(seen):
        return {name for name, legal in zip(TOKENS, seen["action_mask"]) if legal}

    everything = {"+", "-", "*", "/", "sqrt", "sin", "1", "x0", "x1"}  # and no third variable
    assert allowed(seen) == everything
    seen = env.step(TOKENS.index("*"))[0]
    assert allowed(seen) == {"1", "x0", "x1"}, "two places, two tokens left"
    with pytest.raises(ValueError, match="sin is not allowed after"):
        env.step(TOKENS.index("sin"))
    env.reset(seed=0)
    seen = env.step(TOKENS.index("sqrt"))[0]
    assert allowed(seen) == {"sqrt", "sin", "1", "x0", "x1"}
    assert check_env(SymbolicDiscovery).ok


def test_expressions_as_text_and_values() -> None:
    tokens = [TOKENS.index(name) for name in ["/", "-", "x0", "1", "sqrt", "x1"]]
    assert to_text(tokens) == "((x0 - 1) / sqrt(x1))"
    assert evaluate(tokens, np.array([[5.0, 3.0], [4.0, 1.0]])).tolist() == [2.0, 2.0]


def test_the_best_expression_is_read_by_a_call() -> None:
    with make_vector_env("Symbolic-v0", num_envs=2, num_workers=0) as env:
        env.set_reset_options({"law": "pendulum"}, [1])
        step, actor, rng = env.reset(), RandomActor(env.action_space), np.random.default_rng(0)
        for _ in range(60):
            step = env.step(actor.act(step.observations, (), step.episode_starts, rng).env_actions)
        (one, text), (other, _) = env.call("best_expression", at_reset=False)
        assert 0 < one <= 1
        assert 0 < other <= 1
        assert any(name in text for name in TOKENS)


def test_unknown_laws_and_data_are_one_line() -> None:
    env = SymbolicDiscovery()
    for options, words in (
        ({"law": "newton"}, "there is no law 'newton'; use ideal_gas"),
        ({"laws": "x"}, "is a law, or inputs and outputs; got laws"),
        ({"inputs": [[1.0]]}, "got inputs"),
        ({"inputs": [[1.0], [2.0]], "outputs": [3.0, 3.0]}, "not all equal"),
        ({"inputs": [[1.0] * 4, [2.0] * 4], "outputs": [3.0, 4.0]}, "points of 1 to 3 numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            env.reset(options=options)
    assert [task.name for task in target_laws().held_out()] == ["lenses", "projectile"]
