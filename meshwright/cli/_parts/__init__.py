"""What several verbs share: flags, inputs, outputs."""
