"""Links, devices and hosts, and the times of collectives over them: the building blocks of a cluster.

link           latency and bandwidth of a link
machines       devices and hosts
host_links     links between devices of hosts
collectives    times of gathers and reductions
"""
