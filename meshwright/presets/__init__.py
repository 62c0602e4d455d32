"""Files that come with the package: models by name."""
