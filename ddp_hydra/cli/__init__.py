"""The commands: train, evaluate, generate, attach."""
