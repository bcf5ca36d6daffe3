"""Place calls: the devices and shardings of each call of an iteration."""
