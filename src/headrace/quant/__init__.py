"""Numbers in fewer bits: formats, grids, their errors, and stored blocks from float32. Knows no model, needs no torch."""
