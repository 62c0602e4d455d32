"""Files that come with the package: model configurations by name."""
