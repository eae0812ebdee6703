"""One file a command. Heavy imports stand inside the command's function: `--help` imports every file here."""
