"""Errors of a test cluster; every message names the object and the remedy or the log to read."""


class ClusterError(RuntimeError):
    """Raised if a part of the cluster does not start, answer or stop."""


class Unprepared(ClusterError):
    """Raised if the machine lacks a requirement; the message has one line for each."""
