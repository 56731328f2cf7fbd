"""The learner of examples/reinforce, on a bandit whose gradient and expected reward are computed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.typing import ArrayLike

from examples.reinforce.learner import CLIP, Batch, batch_of, loss_of, make_update
from examples.reinforce.rollouts import Sample

pytestmark = pytest.mark.ci

ARMS = 4
REWARDS = np.array([0.0, 0.2, 0.5, 1.0])


def logprobs(params: jax.Array, tokens: jax.Array) -> jax.Array:
    """Compute the log-probabilities of a policy that draws each token from one softmax, whatever comes before
    it.
    """
    return jax.nn.log_softmax(params)[tokens].at[:, 0].set(0.0)


def pull(params: ArrayLike, arms: list[int], rewards: list[float]) -> list[Sample]:
    """One group: a prompt of one token, then one arm in each sample."""
    served = np.asarray(jax.nn.log_softmax(params))
    return [
        Sample(prompt=(0,), tokens=(arm,), logprobs=(float(served[arm]),), text="", reward=reward)
        for arm, reward in zip(arms, rewards, strict=True)
    ]


def test_rows_hold_the_prompt_the_tokens_and_what_the_server_said_of_them():
    one = Sample(prompt=(5, 6), tokens=(7, 8, 9), logprobs=(-1.0, -2.0, -3.0), text="", reward=1.0)
    other = Sample(prompt=(5, 6), tokens=(4,), logprobs=(-0.5,), text="", reward=0.0)
    alone = Sample(prompt=(3,), tokens=(2,), logprobs=(-0.25,), text="", reward=1.0)
    batch = batch_of([[one, other], [alone]])
    assert batch.tokens[:, :6].tolist() == [[5, 6, 7, 8, 9, 0], [5, 6, 4, 0, 0, 0], [3, 2, 0, 0, 0, 0]]
    assert np.argwhere(batch.generated).tolist() == [[0, 2], [0, 3], [0, 4], [1, 2], [2, 1]]
    assert batch.served[batch.generated].tolist() == [-1.0, -2.0, -3.0, -0.5, -0.25]
    assert batch.served[~batch.generated].max() == 0
    assert batch.advantages.tolist() == [0.5, -0.5, 0.0]


def test_the_gradient_is_that_of_the_policy_gradient_theorem():
    """Where the trainer's policy is the server's: the mean of advantage times (one-hot - probabilities)."""
    params = np.array([0.3, -0.2, 0.1, 0.4], np.float32)
    arms, rewards = [0, 1, 3, 3, 2], [0.0, 0.2, 1.0, 1.0, 0.5]
    batch = batch_of([pull(params, arms, rewards)])
    gradient, figures = jax.grad(loss_of, has_aux=True)(jnp.asarray(params), batch, logprobs)
    probabilities = np.exp(params) / np.exp(params).sum()
    advantages = np.array(rewards) - np.mean(rewards)
    by_hand = sum(a * (np.eye(ARMS)[arm] - probabilities) for arm, a in zip(arms, advantages, strict=True))
    np.testing.assert_allclose(gradient, -by_hand / len(arms), atol=1e-6)
    assert figures.max_difference < 1e-6


@pytest.mark.parametrize(
    ("served", "advantage", "moves"),
    [
        (np.log(0.5), 1.0, True),
        (np.log(0.5), -1.0, True),
        (np.log(0.5 / (1 + 2 * CLIP)), 1.0, False),  # it has become likelier by more than the clip allows
        (np.log(0.5 / (1 + 2 * CLIP)), -1.0, True),
        (np.log(0.5 / (1 - 2 * CLIP)), -1.0, False),
        (np.log(0.5 / (1 - 2 * CLIP)), 1.0, True),
    ],
)
def test_what_has_moved_far_enough_is_not_pushed_further(served: float, advantage: float, moves: bool):
    batch = Batch(
        tokens=np.array([[0, 1]]),
        generated=np.array([[False, True]]),
        served=np.array([[0.0, served]], np.float32),
        advantages=np.array([advantage], np.float32),
    )
    gradient, _ = jax.grad(loss_of, has_aux=True)(jnp.zeros(2), batch, logprobs)
    assert (np.abs(gradient).max() > 0) == moves
    if moves:  # a step against the gradient makes the token likelier if its advantage is positive
        assert np.sign(-gradient[1]) == np.sign(advantage)


def test_the_expected_reward_of_a_bandit_rises():
    draw = np.random.default_rng(0)
    params = jnp.zeros(ARMS)
    optimizer = optax.adam(0.1)
    update, state = make_update(logprobs, optimizer), optimizer.init(params)
    expected = [float(REWARDS @ np.asarray(jax.nn.softmax(params)))]
    for _ in range(40):
        weights = np.exp(np.asarray(params, np.float64))
        arms = draw.choice(ARMS, size=64, p=weights / weights.sum()).tolist()
        params, state, _ = update(params, state, batch_of([pull(params, arms, REWARDS[arms].tolist())]))
        expected.append(float(REWARDS @ np.asarray(jax.nn.softmax(params))))
    assert expected[0] == pytest.approx(REWARDS.mean())
    assert expected[10] > expected[0] + 0.1
    assert expected[-1] > 0.9


def test_groups_of_equal_rewards_change_nothing():
    params = jnp.array([0.3, -0.2, 0.1, 0.4])
    gradient, _ = jax.grad(loss_of, has_aux=True)(
        params, batch_of([pull(params, [0, 1, 2], [1.0, 1.0, 1.0])]), logprobs
    )
    assert not np.any(gradient)
