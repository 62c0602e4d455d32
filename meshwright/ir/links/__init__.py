"""Links, devices and hosts, and the times of collectives over them: the building blocks of a cluster."""
