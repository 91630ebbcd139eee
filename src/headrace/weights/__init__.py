"""Files of weights: containers, number formats, and where models come from."""
