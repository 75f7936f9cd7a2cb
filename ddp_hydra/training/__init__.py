"""What a step of training is made of, part by part: the config chooses, and `train.py` puts them in order."""
