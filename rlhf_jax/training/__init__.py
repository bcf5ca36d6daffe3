"""Train the policy, its critic and its student: advantages, losses, and updates."""
