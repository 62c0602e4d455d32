"""A plan: what a user asks for, an own order in it, and its file form."""
