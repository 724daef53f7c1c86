"""What goes wrong with a test cluster; every message names the thing and what to do or where to look."""


class ClusterError(RuntimeError):
    """A part of the cluster did not start, answer or stop."""


class Unprepared(ClusterError):
    """The machine lacks something that a cluster needs; one line for each thing."""
