"""How jobs learn. Derive your own algorithm from one of these: `algorithm: file.py:Class`."""

from motet.algorithms.client import datum
from motet.algorithms.dapo import Dapo
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.presets import Cispo, DrGrpo, Grpo, Gspo, ImportanceSampling, Ppo, Reinforce, Rloo

__all__ = [
    "Cispo",
    "Dapo",
    "DrGrpo",
    "Grpo",
    "Gspo",
    "ImportanceSampling",
    "PolicyGradient",
    "Ppo",
    "Reinforce",
    "Rloo",
    "datum",
]
