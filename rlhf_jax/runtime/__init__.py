"""Hold what any long run over several processes needs: messages, signals, a watchdog."""
