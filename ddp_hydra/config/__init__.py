"""Read and check a job's config: the schema, the project space, the allowed keys and values."""
