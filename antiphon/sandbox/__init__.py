"""Where untrusted code runs: isolation, shell sessions, and a service that lends sandboxes over HTTP."""
