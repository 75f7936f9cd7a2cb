"""The commands: train, evaluate, predict, export, generate, attach, runs, warm, init."""
