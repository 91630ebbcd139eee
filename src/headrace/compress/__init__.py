"""Models in fewer bytes."""
