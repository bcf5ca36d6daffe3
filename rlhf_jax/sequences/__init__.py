"""Token sequences and what is known of them, packed for the programs that read them."""
