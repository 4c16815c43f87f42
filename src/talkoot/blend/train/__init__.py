"""Experts trained by peers that share nothing but a tokenizer: each a job of one peer."""
