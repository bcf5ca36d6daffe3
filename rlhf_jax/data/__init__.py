"""Read prompts and tokenizers, and order prompts into batches."""
