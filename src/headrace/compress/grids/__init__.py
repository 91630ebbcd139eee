"""Number grids: the values that a format can represent, and the search for their scales."""
