"""Post-training among peers with unlike models: they exchange signed completions, never weights."""
