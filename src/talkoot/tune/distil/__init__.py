"""Self-distillation from feedback: the policy learns from itself with a hint in its context."""
