"""Presets by name. A new one is a TOML file in `models/` or `clusters/`; its file name is the name that users type."""
