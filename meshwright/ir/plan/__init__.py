"""A plan: what a user asks for, its optional schedule (`order`), and its file form."""
