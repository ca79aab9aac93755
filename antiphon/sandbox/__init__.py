"""Run untrusted code: isolation, shell sessions, and a service that lends sandboxes over HTTP."""
