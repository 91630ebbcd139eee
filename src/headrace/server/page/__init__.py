"""The page at /: static files, and its one route of help, which makes HTML of an answer's Markdown."""
