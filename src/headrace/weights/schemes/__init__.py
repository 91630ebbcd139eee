"""Folders that others have compressed: each scheme reads matrices as rows of a kind."""
