"""Types, errors, configuration, deadlines, random streams and remote calls, which all other packages use."""
