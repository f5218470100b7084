"""Kernels: arrays in, arrays out, unreduced, no configuration. The stages of `transforms` are made of them."""

from jaxrl_llm.losses import advantages, corrections, divergences, ratios, rewards, surrogates

__all__ = ["advantages", "corrections", "divergences", "ratios", "rewards", "surrogates"]
