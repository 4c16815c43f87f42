"""Corrections for completions that another policy made."""
