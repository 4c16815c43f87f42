"""What an update maximises: the GRPO family as switches."""
