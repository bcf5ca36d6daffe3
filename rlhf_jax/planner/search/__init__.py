"""Find the best plan of calls: what each placement costs, and which are best together."""
