"""Stable-Baselines3 trains with clipping at the step in place of its own, also once a model was saved and loaded."""

import gymnasium
import numpy as np
import pytest
from stable_baselines3 import PPO

import gradclip
from recorded import Recorded

C = 0.05


class Drift(gymnasium.Env):
    """A number that drifts; the reward is how near to 0 it stays."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.left = self.np_random.normal(size=1).astype(np.float32), 8
        return self.at.copy(), {}

    def step(self, action):
        self.at += np.float32(0.3 if action else -0.3)
        self.left -= 1
        return np.clip(self.at, -9, 9), float(-abs(self.at[0])), self.left == 0, False, {}


def check(model, steps):
    recorded = Recorded(model.policy.optimizer)
    clipping = gradclip.clip_at_step(model.policy.optimizer, C)
    model.learn(steps)
    assert len(recorded.used) > 2
    assert max(recorded.raw) > C
    for raw, used in zip(recorded.raw, recorded.used, strict=True):
        assert used == pytest.approx(min(raw, C), rel=1e-3, abs=1e-7)
    clipping.remove()


def test_ppo_before_and_after_it_is_saved(tmp_path):
    model = PPO(
        "MlpPolicy", Drift(), n_steps=64, batch_size=32, n_epochs=2, max_grad_norm=float("inf"), seed=0, device="cpu"
    )
    check(model, 128)
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model", env=Drift(), device="cpu")
    assert loaded.max_grad_norm == float("inf")
    check(loaded, 128)
