"""Measures the devices and links of a machine or a cluster.

discover            the measurement of a cluster
device_speed        one device
link_speed          one link
collective_speed    a collective of two ranks
"""
