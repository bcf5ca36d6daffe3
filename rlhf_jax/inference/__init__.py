"""Score finished samples: log-probabilities of policy and reference, values of the critic."""
