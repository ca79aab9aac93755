"""Interfaces of other libraries, built on the public functions of this one."""
