"""The command line: a file each command; the only place that prints."""
