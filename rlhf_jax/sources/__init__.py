"""Where the samples of a step come from: generated and rewarded, or given with the prompts."""
