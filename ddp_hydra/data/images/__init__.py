"""Labelled images: what sets of them have in common, wherever they are."""
