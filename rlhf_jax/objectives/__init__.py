"""What a run may be for, a file each; `config.objectives` has the registry."""
