"""Rewards: what a completion earned, computed by whoever receives it."""
