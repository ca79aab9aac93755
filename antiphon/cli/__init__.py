"""The command line: one module for each family of commands; `app` is the command, `main` runs it."""
