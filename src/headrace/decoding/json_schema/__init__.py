"""JSON schemas prepared for masks: keywords that the grammar compiler does not know are rewritten into ones it knows,
exactly."""
