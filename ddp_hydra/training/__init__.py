"""The training loop and its parts: the config chooses the parts, `setup.py` builds them, `loop.py` runs them."""
