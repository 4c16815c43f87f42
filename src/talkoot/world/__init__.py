"""The two worlds: one interface (`api`), simulated (`sim`) and real (`real`). Peer code cannot tell them apart."""
