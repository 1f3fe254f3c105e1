"""The command line: one file a command (train, embed, inspect, show), main.py, and what the commands share."""
