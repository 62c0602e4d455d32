"""Links, devices and hosts, and the times of collectives over them: the parts of a cluster."""
