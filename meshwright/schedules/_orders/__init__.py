"""Methods to find an order of actions, shared by the schedules."""
