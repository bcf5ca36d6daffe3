"""Sources of the samples of a step: generated and rewarded, or given with the prompts."""
