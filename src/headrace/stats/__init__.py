"""Statistics on plain numbers: calibrated thresholds, confidences, text similarity, perplexity. Needs NumPy alone."""
