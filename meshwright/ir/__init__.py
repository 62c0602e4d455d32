"""The intermediate representation: frozen data, no torch; every type round-trips through its file form."""
