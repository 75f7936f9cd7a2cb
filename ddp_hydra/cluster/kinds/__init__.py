"""Kinds of clusters, one module each."""
