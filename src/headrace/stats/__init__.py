"""Statistics on plain numbers: calibrated thresholds, confidences, paired ratios, text similarity, perplexity. NumPy alone."""
