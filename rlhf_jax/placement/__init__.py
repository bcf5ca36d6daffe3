"""Move weights between the devices and layouts of calls."""
