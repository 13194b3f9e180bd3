"""`tokenbus selftest`: every switch against the plain run, on the user's own machine and model."""
