"""Several models made one: domain experts, ensembles, routers and mixtures. Nothing here trains what it combines."""
