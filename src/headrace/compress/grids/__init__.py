"""Numbers in fewer bits: formats, grids, their errors, stored blocks from float32, and the column loop; it alone needs torch.

Knows no model."""
