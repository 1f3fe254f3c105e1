"""The command line: one file for each command (train, embed, inspect, show), main.py, and code that
the commands share."""
