"""Number formats of linears and the maths of quantising."""
