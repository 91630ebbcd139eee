"""One readable file per architecture."""
