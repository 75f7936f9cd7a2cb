"""Runs one composed config and fills one run directory."""
