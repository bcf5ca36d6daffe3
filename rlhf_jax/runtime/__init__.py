"""Services for long runs over several processes: messages, signals, checkpoints, a watchdog."""
