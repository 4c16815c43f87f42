"""The two worlds: one interface (`api`), simulated (`sim`) and real (`real`). Peer code runs in both."""
