"""The commands: train, evaluate, predict, export, generate, attach, init."""
