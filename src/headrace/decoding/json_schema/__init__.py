"""JSON schemas made ready for a mask: what the grammar compiler does not know is said in words it knows, exactly."""
