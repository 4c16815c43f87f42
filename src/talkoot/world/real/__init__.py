"""The real world: one process per peer over ZeroMQ, supervised by the lead."""
