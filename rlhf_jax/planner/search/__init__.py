"""Find the best plan of calls: the costs of each placement, and the best combination."""
