"""What a user's script touches: verify now; the Trainer builds on the same parts."""
