"""What everything else builds on: types, errors, configuration, deadlines, random streams, remote calls."""
