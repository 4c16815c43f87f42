"""Runs as functions: each returns a full, checked recipe."""
