"""The op vocabulary: what each op means, in torch, and what runs it faster."""
