"""Reads and checks a job's config: the schema, the project space, the allowed keys and values."""
