"""The command line: one file for each command, main.py, and what the commands share."""
