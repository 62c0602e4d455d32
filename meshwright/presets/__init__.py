"""Files that come with the package: model configurations and clusters by name."""
