"""Training in rounds: replicas that step by themselves and agree now and then, without a barrier."""
