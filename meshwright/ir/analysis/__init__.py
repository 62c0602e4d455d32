"""What follows from a schedule: effects (the dependency rule), orders, lifetimes, prices."""
