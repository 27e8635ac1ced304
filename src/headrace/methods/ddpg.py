"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2015, arXiv:1509.02971), a case of TD3."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.methods.td3 import TD3

__all__ = ["DDPG"]


@dataclass(frozen=True)
class DDPG(TD3):
    """TD3 with one critic, a policy that learns in every update, and no noise on targets' actions."""

    critics: int = 1
    policy_delay: int = 1
    target_noise: float = 0.0
