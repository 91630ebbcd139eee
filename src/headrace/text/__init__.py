"""Text in and out: tokenizers, incremental detokenizing, stop strings, chat templates, terminal width. No torch here."""
