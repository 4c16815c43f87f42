"""The simulated world: one process, virtual time, the shipping code."""
