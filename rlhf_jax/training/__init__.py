"""Train the policy, its critic and its student: advantages, gradients, and updates."""
